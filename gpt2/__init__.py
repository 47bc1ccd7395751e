"""GPT-2 training in plain PyTorch, with every optimisation a toggle."""
