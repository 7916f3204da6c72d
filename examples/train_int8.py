"""Train a small network in INT8 on one machine, and report the formats that ran:

python examples/train_int8.py
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qsync_fx


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 16, 128)
        self.classifier = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.features(images)), 2)
        x = torch.relu(self.hidden(x.flatten(1)))
        result: Tensor = self.classifier(x)
        return result


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = Network()
    plan = qsync_fx.Plan("int8", [("classifier", "fp32")])
    options: Any = {"plan": plan}
    compiled: Any = torch.compile(model, backend="qsync", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(10):
        for batch in torch.split(torch.randperm(1500), 100):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(compiled(images[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    print(qsync_fx.plan_coverage(compiled))
    with torch.no_grad():
        accuracy = (model.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
