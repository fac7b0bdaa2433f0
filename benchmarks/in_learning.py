"""Study: does a variational posterior give better prior precisions during training than Laplace?"""

import csv
import math
import sys
import time
from pathlib import Path

import torch
from classifiers import task_of
from rivals import SCHEDULE, metrics, train

from evigrad import Evidence, Laplace
from evigrad.likelihoods import Categorical
from evigrad.posterior import variational as V
from evigrad.posterior.covariances import Dense, Kronecker
from evigrad.priors import GaussianPrior
from evigrad.training.plan import BURN_IN_DECAY, burn_in_precision, plan_schedule

OUT = Path(sys.argv[1])
SETS = sys.argv[2].split(",")
SEEDS = [int(s) for s in sys.argv[3].split(",")]
WAYS = sys.argv[4].split(",")
DATA, BACKBONE = sys.argv[5], Path("backbone.pt")

F = V._Fitter
cov, mean, exp = F.with_better_covariance, F.with_better_mean, F._expectations


def set_mode(way):
    F.with_better_covariance, F.with_better_mean, F._expectations = cov, mean, exp
    if way == "fixed":
        F.with_better_mean = lambda self, s: s
    if way == "linear":
        F.with_better_covariance = lambda self, s: s
        F._expectations = lambda self, m, root: exp(self, m, torch.zeros_like(root))
    V.fit_gaussian  # unchanged loop


def gammas(posterior, prior):
    c, out = (
        posterior._covariance if hasattr(posterior, "_covariance") else posterior.covariance,
        {},
    )
    for b in c.blocks:
        d = prior[b.names[0]].detach().double()
        if isinstance(b, Dense):
            (key,) = b.names
            out[key] = len(b.factor) - float(torch.cholesky_inverse(b.factor.double()).trace())
            continue
        std = b.std.double()
        out[b.name] = (
            float((1 - d * std.square()).sum())
            if isinstance(b, Kronecker) or c.explained is None
            else 0.0
        )
    e = c.explained
    if e is not None:
        inv = torch.cholesky_inverse(e.factor)
        inv = inv * e.scale * e.scale[:, None]
        for n, chunks in e.rows.items():
            d = prior[n].detach().double()
            out[n] = sum(float((inv * (x.double() @ x.double().mT)).sum()) for x in chunks) / float(
                d
            )
    return out


def run(name, seed, way):
    structure, mode = way.split("-")
    task, _ = task_of(name, seed, DATA, BACKBONE)
    x, y = task.data.train
    N = len(x)
    sch = plan_schedule(SCHEDULE, N)
    net = task.network()
    torch.manual_seed(seed)
    prior = GaussianPrior("layerwise", burn_in_precision(BURN_IN_DECAY, N), learnable=False)
    ev = Evidence(net, Categorical(), prior, estimator="kfac-N-C", num_data=N, generator=seed)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    steps = sch.epochs * math.ceil(N / sch.batch_size)
    lr = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps, 1e-6)
    seconds = 0.0
    start = time.process_time()
    bound = None
    for epoch in range(1, sch.epochs + 1):
        for i in torch.randperm(N).split(sch.batch_size):
            opt.zero_grad()
            ev.map_loss(x[i], y[i], optimizer=opt).backward()
            opt.step()
            lr.step()
        if epoch >= sch.burn_in and (epoch - sch.burn_in) % sch.every == 0:
            t = time.process_time()
            net.eval()
            precisions = {n: p.detach().clone() for n, p in prior.precisions().items()}
            set_mode(mode)
            options = {"structure": structure}
            if structure == "ntk":
                options["rows"] = 400
            if mode != "laplace":
                options["inference"] = "variational"
            post = ev.posterior((x, y), **options)
            g = gammas(post, precisions)
            shift = post._means
            w = {n: p.detach().double() for n, p in ev.weights().items()}
            with torch.no_grad():
                new = []
                for key in w:
                    m = w[key] if mode in ("laplace", "fixed") else shift.get(key, w[key]).double()
                    old, value = (
                        float(precisions[key]),
                        max(g[key], 1e-3) / max(float(m.square().sum()), 1e-12),
                    )
                    new.append(math.log(min(max(value, old / 30), old * 30)))
                prior.log_precision.copy_(torch.tensor(new))
            net.train()
            seconds += time.process_time() - t
    total = time.process_time() - start
    net.eval()
    set_mode("moved")
    post = ev.posterior((x, y), structure="kfac", inference="variational")
    xt, yt = task.data.test
    with torch.no_grad():
        f = torch.cat([net(part) for part in xt.split(1000)])
        ftr = net(x)
    return dict(
        set=name,
        seed=seed,
        way=way,
        **{k: metrics(f, yt)[k] for k in ("log_likelihood", "accuracy")},
        train=metrics(ftr, y)["log_likelihood"],
        bound=post.bound / N,
        seconds=total,
        rounds=seconds,
        decay=" ".join(f"{float(v):.3g}" for v in ev.weight_decay().values()),
    )


def run_weight(name, seed, c):
    task, _ = task_of(name, seed, DATA, BACKBONE)
    x, y = task.data.train
    t = time.process_time()
    fitted = train(task, laplace=Laplace(log_det_weight=c))
    total = time.process_time() - t
    set_mode("moved")
    xt, yt = task.data.test
    out = {}
    for s in ("kfac", "last-layer"):
        out[s] = fitted.evidence.posterior(
            (x, y), structure=s, inference="variational"
        ).bound / len(x)
    m = metrics(fitted.outputs(xt), yt)
    return dict(
        set=name,
        seed=seed,
        way=f"c={c:g}",
        log_likelihood=m["log_likelihood"],
        accuracy=m["accuracy"],
        train=metrics(fitted.outputs(x), y)["log_likelihood"],
        bound=out["kfac"],
        seconds=total,
        rounds=out["last-layer"],
        decay="",
    )


if __name__ == "__main__":
    done = set()
    if OUT.exists():
        done = {(r["set"], r["seed"], r["way"]) for r in csv.DictReader(OUT.open())}
    for name in SETS:
        for seed in SEEDS:
            for way in WAYS:
                if (name, str(seed), way) in done:
                    continue
                r = (
                    run_weight(name, seed, float(way[2:]))
                    if way.startswith("c=")
                    else run(name, seed, way)
                )
                new = not OUT.exists()
                with OUT.open("a") as fh:
                    wr = csv.DictWriter(fh, r.keys())
                    if new:
                        wr.writeheader()
                    wr.writerow(r)
                print(
                    {k: (round(v, 4) if isinstance(v, float) else v) for k, v in r.items()},
                    flush=True,
                )
