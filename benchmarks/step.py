"""What `make_train_step` costs above raw DistributedDataParallel: a 10 k-parameter MLP, one worker, arms interleaved.

    python benchmarks/step.py [--rounds 400] [--steps 20]

One worker, so that waiting for the network does not hide the difference. Three arms in every round, in a new order: raw DDP, raw
DDP again (A/A), and unidist. Reports the median of the paired differences with a bootstrap 95% interval. CPU figures on a CPU.
"""

import argparse
import os
import time

import numpy
import torch

import unidist


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )


def raw_step(loss_fn):
    model = torch.nn.parallel.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch):
        x, y = batch
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def unidist_step(loss_fn):
    model = unidist.wrap_model(mlp())
    optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    return unidist.make_train_step(model, optimizer, loss_fn)


def interval(differences, rng):
    draws = rng.choice(differences, (2000, len(differences)))
    return numpy.percentile(numpy.median(draws, axis=1), [2.5, 97.5])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    unidist.init(backend="ddp")
    loss_fn = torch.nn.functional.cross_entropy
    batch = (torch.randn(32, 64), torch.randint(0, 10, (32,)))
    arms = {"raw": raw_step(loss_fn), "raw again": raw_step(loss_fn), "unidist": unidist_step(loss_fn)}
    times = {name: [] for name in arms}
    rng = numpy.random.default_rng(0)
    for round in range(args.rounds + 20):
        for name in rng.permutation(list(arms)):
            step, began = arms[name], time.perf_counter()
            for _ in range(args.steps):
                step(batch)
            if round >= 20:
                times[name].append((time.perf_counter() - began) / args.steps * 1e6)
    raw = numpy.array(times["raw"])
    print(
        f"torch {torch.__version__}, one worker, {sum(p.numel() for p in mlp().parameters())} parameters, raw step {numpy.median(raw):.0f} us"  # noqa: E501
    )
    for name in ("raw again", "unidist"):
        differences = numpy.array(times[name]) - raw
        low, high = interval(differences, rng)
        ratio = numpy.median(numpy.array(times[name]) / raw)
        print(f"{name:10s} {numpy.median(differences):+6.1f} us a step, 95% [{low:+.1f}, {high:+.1f}]; {ratio:.3f}x")
    unidist.shutdown()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
