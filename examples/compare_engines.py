"""Run the same trace through the baseline and the extended engine, and read the result."""

import json
import subprocess
import sys
import tempfile


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tiny_vllm", "bench", "--workload", "demo"]
        command += [
            "--variants",
            "origin,extended",
            "--scale",
            "0.05",
            "--dtype",
            "float32",
            "--out",
            folder,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    for variant in summary["variants"]:
        cache = variant["cache"]
        print(
            f"{variant['name']:<10} {variant['throughput_tok_s']:8.1f} tok/s  "
            f"prefill {variant['prefill_s']:6.2f} s  "
            f"cached tokens {cache['cached_tokens'] if cache else 0}"
        )
    print("speedup:", summary["speedup"])
    print("same outputs:", summary["outputs_match"])


if __name__ == "__main__":
    main()
