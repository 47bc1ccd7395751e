// Causal attention on a CPU, forward and backward, a head at a time; the heads are shared out among the threads.
//
// Only a block of rows of the scores is ever in memory. Its matrix products are oneDNN's small ones, which torch hands
// on as at::native::cpublas::brgemm: C = A B or C += A B in float32, of an A that lies by rows, and of a B that lies by
// rows in float32 and by pairs of rows in bfloat16, as the CPU's instructions take it. T is filled up with zeros to
// `padded`, so that no loop has a rest: those rows come after all others, which therefore do not attend to them.
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using at::BFloat16;
using at::native::cpublas::brgemm;

constexpr int64_t PAD = 16;    // numbers of float32 in the widest registers
constexpr int64_t BLOCK = 64;  // rows of scores at once, 256 KiB of 1,024 columns: caches hold what a head needs
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// Queries, keys and values lie as one linear layer makes them, (B, T, 3, heads, width); results (B, T, heads, width).
struct Shape {
  int64_t B, T, heads, width;

  int64_t padded() const { return (T + PAD - 1) / PAD * PAD; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(width)); }
  // Into how many parts a head's blocks are cut, where threads would have none or fewer heads than others: the fewest
  // that spare a tenth of the time, for each part packs its head anew.
  int64_t parts() const {
    const auto time = [&](int64_t parts) {  // of the thread that has most to do, in heads
      const int64_t threads = at::get_num_threads(), most = (B * heads * parts + threads - 1) / threads;
      return static_cast<double>(most) / parts;
    };
    int64_t best = 1;
    for (int64_t parts = 2; parts <= (T + BLOCK - 1) / BLOCK; parts++)
      if (time(parts) < 0.9 * time(best)) best = parts;
    return best;
  }
};

template <typename Number>
struct Head {  // one of them in memory, by its first row
  int64_t row, stride, query, result;

  Head(const Shape& s, int64_t head)
      : row(s.heads * s.width),
        stride(3 * row),
        query(head / s.heads * s.T * stride + head % s.heads * s.width),
        result(head / s.heads * s.T * row + head % s.heads * s.width) {}
};

// e^x as 2^n 2^f: n is whole and f within a half of 0, where Taylor's polynomial errs by 1e-8. A NaN stays one.
inline float exponential(float x) {
  constexpr float LOG2_E = 1.44269504f;
  x = x < -87.0f ? -87.0f : x;
  const float n = std::nearbyint(x * LOG2_E), f = std::fma(x, LOG2_E, -n);
  float power = 1.52527338e-5f;
  power = std::fma(power, f, 1.54035304e-4f);
  power = std::fma(power, f, 1.33335581e-3f);
  power = std::fma(power, f, 9.61812911e-3f);
  power = std::fma(power, f, 5.55041087e-2f);
  power = std::fma(power, f, 2.40226507e-1f);
  power = std::fma(power, f, 6.93147181e-1f);
  power = std::fma(power, f, 1.0f);
  return power * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

inline void convert(const float* in, float* out, int count) { std::copy_n(in, count, out); }
inline void convert(const float* in, BFloat16* out, int count) {
  int c = 0;
#ifdef __AVX512BF16__
  for (; c + PAD <= count; c += PAD) {
    const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(in + c)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + c), rounded);
  }
#endif
  for (; c < count; c++) out[c] = in[c];
}

template <typename Number>
constexpr int64_t TOGETHER = std::is_same_v<Number, BFloat16> ? 2 : 1;  // rows of a product's B that lie together

// A product's B of `rows` by `columns`, of which `real` rows are at `in` and the rest are zeros.
template <typename Number>
void pack(const Number* in, int64_t stride, int64_t real, int64_t rows, int64_t columns, Number* out) {
  const std::vector<Number> zeros(columns, Number(0));
  const auto row = [&](int64_t r) { return r < real ? in + r * stride : zeros.data(); };
  if constexpr (TOGETHER<Number> == 1) {
    for (int64_t r = 0; r < rows; r++) std::copy_n(row(r), columns, out + r * columns);
  } else {
    for (int64_t r = 0; r < rows; r += 2) {
      const auto *first = reinterpret_cast<const uint16_t*>(row(r)), *second = reinterpret_cast<const uint16_t*>(row(r + 1));
      auto* pairs = reinterpret_cast<uint32_t*>(out + r * columns);
#pragma omp simd
      for (int64_t c = 0; c < columns; c++) pairs[c] = first[c] | static_cast<uint32_t>(second[c]) << 16;
    }
  }
}

// A product's B of `columns` by `rows`, the transpose of the same; `rows` is a multiple of PAD.
template <typename Number>
void pack_transposed(const Number* in, int64_t stride, int64_t real, int64_t rows, int64_t columns, Number* out) {
  using Together = std::conditional_t<TOGETHER<Number> == 2, uint32_t, float>;
  const auto from = [&](int64_t r) { return reinterpret_cast<const Together*>(in + r * stride); };
  auto* packed = reinterpret_cast<Together*>(out);
  const int64_t count = columns / TOGETHER<Number>;
  for (int64_t start = 0; start < rows; start += PAD)  // a cache line of each row of the result
    for (int64_t c = 0; c < count; c++)
      for (int64_t r = start; r < start + PAD; r++) packed[c * rows + r] = r < real ? from(r)[c] : Together(0);
}

// What oneDNN keeps for a thread between products, AMX's tiles among it, is given back however the thread's work ends.
struct Release {
  ~Release() { at::native::cpublas::brgemm_release(); }
};

// Calls work(head, part) for all of them, on all threads.
template <typename Work>
void share_out(const Shape& s, int64_t parts, const Work& work) {
  at::parallel_for(0, s.B * s.heads * parts, 1, [&](int64_t from, int64_t to) {
    const Release at_the_end;
    for (int64_t item = from; item < to; item++) work(item / parts, item % parts);
  });
}

// One row of scores becomes its softmax times the sum of exponentials; returns that sum, and the largest score.
inline std::pair<float, float> exponentials(float* scores, float scale, int seen, int columns) {
  float largest = -INFINITE, sum = 0;
#pragma omp simd reduction(max : largest)
  for (int c = 0; c < seen; c++) largest = scores[c] > largest ? scores[c] : largest;
  largest *= scale;
#pragma omp simd reduction(+ : sum)
  for (int c = 0; c < columns; c++) {
    const float power = exponential(std::fma(scores[c], scale, -largest));
    scores[c] = c < seen ? power : 0.0f;
    sum += scores[c];
  }
  return {sum, largest};
}

template <typename Number>
void forward(const Number* qkv, Number* out, float* log_sum, const Shape& s) {
  const int64_t width = s.width, padded = s.padded(), parts = s.parts();
  share_out(s, parts, [&](int64_t head, int64_t part) {
    const Head<Number> at(s, head);
    const Number *q = qkv + at.query, *k = q + at.row, *v = k + at.row;
    std::vector<Number> keys(padded * width), values(padded * width), shares(BLOCK * padded);
    std::vector<float> scores(BLOCK * padded), result(BLOCK * width);
    pack_transposed(k, at.stride, s.T, padded, width, keys.data());
    pack(v, at.stride, s.T, padded, width, values.data());
    for (int64_t i = part * BLOCK; i < s.T; i += parts * BLOCK) {
      const int64_t rows = std::min(BLOCK, s.T - i), columns = (i + rows + PAD - 1) / PAD * PAD;
      float sums[BLOCK];
      brgemm(rows, columns, width, at.stride, padded, columns, false, q + i * at.stride, keys.data(), scores.data());
      for (int64_t r = 0; r < rows; r++) {
        float* row = scores.data() + r * columns;
        const auto [sum, largest] = exponentials(row, s.scale(), i + r + 1, columns);
        convert(row, shares.data() + r * columns, columns);
        sums[r] = sum;
        log_sum[head * s.T + i + r] = largest + std::log(sum);
      }
      brgemm(rows, width, columns, columns, width, width, false, shares.data(), values.data(), result.data());
      for (int64_t r = 0; r < rows; r++) {
        float* row = result.data() + r * width;
        for (int64_t c = 0; c < width; c++) row[c] /= sums[r];
        convert(row, out + at.result + (i + r) * at.row, width);
      }
    }
  });
}

// What the backward pass of a head holds between its blocks.
template <typename Number>
struct Backward {
  std::vector<Number> queries, queries_across, of_out, of_out_across, keys_across, shares, of_scores, of_scores_packed;
  std::vector<float> scores, of_shares, result, logs, less;

  Backward(int64_t padded, int64_t width)
      : queries(padded * width),
        queries_across(padded * width),
        of_out(padded * width),
        of_out_across(padded * width),
        keys_across(BLOCK * width),
        shares(BLOCK * padded),
        of_scores(BLOCK * padded),
        of_scores_packed(BLOCK * padded),
        scores(BLOCK * padded),
        of_shares(BLOCK * padded),
        result(BLOCK * width),
        logs(padded, INFINITE),  // so that a query that is none has shares that vanish
        less(padded, 0.0f) {}

  // Scores and gradients of shares, of keys by queries, become shares and gradients of scores. Keys come from the
  // first query on: the one of row r is seen by queries from r on.
  void shares_and_scores(int64_t first, int64_t rows, int columns, float scale) {
    const float *log = logs.data() + first, *d = less.data() + first;
    for (int64_t r = 0; r < rows; r++) {
      float *score = scores.data() + r * columns, *of_share = of_shares.data() + r * columns;
      const int hidden = r;
#pragma omp simd
      for (int c = 0; c < columns; c++) {
        const float power = exponential(std::fma(score[c], scale, -log[c]));
        score[c] = c < hidden ? 0.0f : power;
        of_share[c] = score[c] * (of_share[c] - d[c]);
      }
      convert(score, shares.data() + r * columns, columns);
      convert(of_share, of_scores.data() + r * columns, columns);
    }
  }
};

// With P the softmax of the scores S, and G the gradient of the result: dV = P' G, dP = G V', dS = P (dP - D) where D
// is the row's sum of gradient times result, dK = dS' Q and dQ = dS K. All are taken transposed and by blocks of keys,
// so that the queries that see such a block make one product.
template <typename Number>
void backward(const Number* qkv, const Number* out, const float* log_sum, const Number* gradient, Number* to_qkv,
              const Shape& s) {
  const int64_t width = s.width, padded = s.padded(), parts = s.parts(), size = width * padded;
  const float scale = s.scale();
  std::vector<float> sums(parts > 1 ? s.B * s.heads * parts * size : 0);  // transposed dQ of each part
  const auto write_queries = [&](int64_t head, const float* sum) {
    const Head<Number> at(s, head);
    for (int64_t start = 0; start < s.T; start += PAD)
      for (int64_t c = 0; c < width; c++)
        for (int64_t r = start; r < std::min(s.T, start + PAD); r++)
          to_qkv[at.query + r * at.stride + c] = sum[c * padded + r] * scale;
  };
  share_out(s, parts, [&](int64_t head, int64_t part) {
    const Head<Number> at(s, head);
    const Number *q = qkv + at.query, *k = q + at.row, *v = k + at.row, *of_out = gradient + at.result;
    Number *to_k = to_qkv + at.query + at.row, *to_v = to_k + at.row;
    Backward<Number> b(padded, width);
    std::vector<float> own(parts > 1 ? 0 : size);
    float* to_queries = parts > 1 ? sums.data() + (head * parts + part) * size : own.data();
    pack(q, at.stride, s.T, padded, width, b.queries.data());
    pack_transposed(q, at.stride, s.T, padded, width, b.queries_across.data());
    pack(of_out, at.row, s.T, padded, width, b.of_out.data());
    pack_transposed(of_out, at.row, s.T, padded, width, b.of_out_across.data());
    for (int64_t r = 0; r < s.T; r++) {
      const Number *result = out + at.result + r * at.row, *of_result = of_out + r * at.row;
      for (int64_t c = 0; c < width; c++) b.less[r] += static_cast<float>(result[c]) * static_cast<float>(of_result[c]);
      b.logs[r] = log_sum[head * s.T + r];
    }
    for (int64_t j = part * BLOCK; j < s.T; j += parts * BLOCK) {
      const int64_t rows = std::min(BLOCK, s.T - j), even = (rows + 1) / 2 * 2, columns = padded - j;
      const auto by_queries = [&](const Number* keys, const std::vector<Number>& queries, std::vector<float>& scores) {
        const Number* from = queries.data() + TOGETHER<Number> * j;
        brgemm(rows, columns, width, at.stride, padded, columns, false, keys + j * at.stride, from, scores.data());
      };
      const auto to_keys = [&](const std::vector<Number>& factors, const std::vector<Number>& queries, float by,
                               Number* to) {
        const Number* from = queries.data() + j * width;
        brgemm(rows, width, columns, columns, width, width, false, factors.data(), from, b.result.data());
        for (float& number : b.result) number *= by;
        for (int64_t r = 0; r < rows; r++) convert(b.result.data() + r * width, to + (j + r) * at.stride, width);
      };
      by_queries(k, b.queries_across, b.scores);
      by_queries(v, b.of_out_across, b.of_shares);
      b.shares_and_scores(j, rows, columns, scale);
      to_keys(b.shares, b.of_out, 1, to_v);
      to_keys(b.of_scores, b.queries, scale, to_k);
      pack(b.of_scores.data(), columns, rows, even, columns, b.of_scores_packed.data());
      for (int64_t r = 0; r < even; r++)
        for (int64_t c = 0; c < width; c++)
          b.keys_across[c * even + r] = r < rows ? k[(j + r) * at.stride + c] : Number(0);
      brgemm(width, columns, even, even, columns, padded, true, b.keys_across.data(), b.of_scores_packed.data(),
             to_queries + j);
    }
    if (parts == 1) write_queries(head, to_queries);
  });
  if (parts > 1)
    share_out(s, 1, [&](int64_t head, int64_t) {
      float* sum = sums.data() + head * parts * size;
      for (int64_t part = 1; part < parts; part++)
        for (int64_t c = 0; c < size; c++) sum[c] += sum[part * size + c];
      write_queries(head, sum);
    });
}

// Exceptions end here, for the caller is not C++: what went wrong, or null.
template <typename Work>
const char* told(const Work& work) {
  static thread_local std::string what;
  try {
    work();
    return nullptr;
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  }
  return what.c_str();
}

}  // namespace

#define FOR(NAME, NUMBER)                                                                                            \
  extern "C" const char* attention_##NAME(const NUMBER* qkv, NUMBER* out, float* log_sum, int64_t B, int64_t T,      \
                                          int64_t heads, int64_t width) {                                            \
    return told([&] { forward(qkv, out, log_sum, Shape{B, T, heads, width}); });                                     \
  }                                                                                                                  \
  extern "C" const char* attention_backward_##NAME(const NUMBER* qkv, const NUMBER* out, const float* log_sum,       \
                                                   const NUMBER* gradient, NUMBER* to_qkv, int64_t B, int64_t T,     \
                                                   int64_t heads, int64_t width) {                                   \
    return told([&] { backward(qkv, out, log_sum, gradient, to_qkv, Shape{B, T, heads, width}); });                  \
  }
FOR(float32, float)
FOR(bfloat16, BFloat16)
