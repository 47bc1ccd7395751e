"""The harness: reads ladders, runs rungs in fresh processes, records and reports what they measured."""
