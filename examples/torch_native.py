"""Plain PyTorch, with your own loop: three lines say that it is distributed.

    python examples/torch_native.py
    unidist run -n 2 examples/torch_native.py            # DistributedDataParallel
    unidist run -n 2 --backend horovod --framework torch examples/torch_native.py
"""

import argparse
import itertools

import torch
from sklearn.datasets import load_digits

import unidist


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(64, 128)
        self.output = torch.nn.Linear(128, 10)

    def forward(self, x):
        return self.output(torch.relu(self.hidden(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--steps", type=int, help="stop each epoch after so many steps")
    args = parser.parse_args()

    unidist.init(framework="torch", seed=0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32)
    y = torch.tensor(labels)
    train = torch.utils.data.TensorDataset(x[:1437], y[:1437])
    test = torch.utils.data.TensorDataset(x[1437:], y[1437:])

    model = unidist.wrap_model(Net())
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    data = unidist.wrap_data(train, global_batch_size=64, shuffle=True)
    loss_fn = torch.nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        mean = unidist.Mean()
        for images, labels in itertools.islice(data, args.steps):
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            mean.update(loss.detach())
        mean_loss = mean.compute()
        unidist.print(f"epoch {epoch + 1}/{args.epochs}: loss {mean_loss:.4f}")

    results = unidist.evaluate(
        model,
        unidist.wrap_data(test, global_batch_size=64),
        loss_fn,
        {"accuracy": lambda outputs, labels: (outputs.argmax(1) == labels).float()},
    )
    unidist.print(f"test accuracy {results['accuracy']:.4f}")


if __name__ == "__main__":
    main()
