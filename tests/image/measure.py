"""Run inside the image: bytes of torch and all that it requires, as their wheels are and as they are here.

`wheels`: what pip installs, by the wheels' own lists, with the bytecode that is here; `left`: without what the
build removed again; `others`: all other packages.
"""

import json
import re
from importlib import metadata
from pathlib import Path


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sizes(distribution: metadata.Distribution) -> tuple[int, int]:
    """Bytes of its files as the wheel lists them, and as they are; bytecode is in both."""
    listed = left = 0
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        compiled = [*(path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")] if path.suffix == ".py" else []
        bytecode = sum(cached.stat().st_size for cached in compiled)
        here = path.lstat().st_size if path.exists() else 0
        left += here + bytecode
        listed += (file.size or here) + bytecode
    return listed, left


installed = {normalized(d.metadata["Name"]): d for d in metadata.distributions()}
torch: set[str] = set()
waiting = ["torch"]
while waiting:
    name = waiting.pop()
    if name in torch or name not in installed:
        continue
    torch.add(name)
    for text in installed[name].requires or ():
        requirement = re.match(r"[A-Za-z0-9._-]+", text)
        # torch asks for cuda-toolkit's extras: there they are the libraries themselves.
        if requirement is not None and (name == "cuda-toolkit" or "extra ==" not in text):
            waiting.append(normalized(requirement.group()))
measured = {name: sizes(distribution) for name, distribution in installed.items()}
print(
    json.dumps(
        {
            "wheels": sum(measured[name][0] for name in torch),
            "left": sum(measured[name][1] for name in torch),
            "others": sum(left for name, (_, left) in measured.items() if name not in torch),
        }
    )
)
