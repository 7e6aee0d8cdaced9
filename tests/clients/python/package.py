"""Builds the wheel of client/python, installs it into a folder, and runs the Python of its README against two routers.

Arguments: the routers' addresses. The first line of the output is the whole text of the same request, as a JSON string; after
it, the README's code prints its text piece by piece, as it comes.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = REPOSITORY / "client" / "python"
OPTIONS = "max_tokens=200"


def install(folder):
    """Builds a wheel in a copy, which keeps the sources clean, and installs it."""
    source = Path(folder, "source")
    for name in ("client/python", "proto"):
        shutil.copytree(REPOSITORY / name, source / name)
    shutil.copy(REPOSITORY / "Cargo.toml", source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", f"--wheel-dir={folder}/wheels", source / "client/python"], check=True)
    [wheel] = Path(folder, "wheels").glob("inflight_client-*-py3-none-any.whl")
    # With its dependencies, which are there already: a wheel that needs others fails.
    subprocess.run([*pip, "install", "--no-index", "--no-deps", f"--target={folder}/site", wheel], check=True)
    sys.path.insert(0, f"{folder}/site")
    subprocess.run([*pip, "install", "--no-index", "--dry-run", wheel], check=True, stdout=subprocess.DEVNULL)


def main():
    first, second = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        install(folder)
        [code] = [block for block in re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)]
        code = code.replace("127.0.0.1:8650", first).replace("127.0.0.1:8750", second)
        # The same output each time.
        assert OPTIONS in code, code
        code = code.replace(OPTIONS, f"{OPTIONS}, seed=7, temperature=1.0")

        import grpc
        import inflight_client

        assert inflight_client.__file__.startswith(folder), inflight_client.__file__
        with inflight_client.Client([second]) as client:
            [model] = client.models()
            assert model.workers == 1 and model.vocab_size > 0, model
            whole = client.complete("Once upon a time", max_tokens=200, seed=7, temperature=1.0)
            assert whole.usage.completion_tokens == len(whole.choices[0].token_ids) <= 200, whole
            assert whole.choices[0].finish_reason in ("length", "stop") and whole.seed == 7, whole
            several = client.complete([inflight_client.Message("user", "Hello")], n=3, max_tokens=5)
            assert [len(choice.token_ids) for choice in several.choices] == [5, 5, 5], several
            tool = inflight_client.Tool("weather", parameters={"type": "object"})
            for options in ({"tools": [tool], "tool_choice": "other"}, {"tool_choice": "required"}):
                try:
                    client.stream("a", **options)
                except ValueError as error:
                    assert "tool_choice" in str(error), error
                else:
                    raise AssertionError(f"accepted {options}")
            with client.stream("Once upon a time", max_tokens=200) as stream:
                next(stream)
                canceller = threading.Timer(0.1, stream.close)
                canceller.start()
                try:
                    for _ in stream:
                        pass
                except grpc.RpcError as error:
                    assert error.code() == grpc.StatusCode.CANCELLED, error
                else:
                    raise AssertionError("a closed stream goes on to its end")
            for wrong in ([], ["text"], [1, "text"], b"text"):
                try:
                    client.stream(wrong)
                except TypeError as error:
                    assert "the prompt" in str(error), error
                else:
                    raise AssertionError(f"accepted {wrong}")
        print(json.dumps(whole.text), flush=True)
        exec(compile(code, "README.md", "exec"), {})


if __name__ == "__main__":
    main()
