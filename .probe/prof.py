import sys

import torch
from torch.profiler import ProfilerActivity, profile

from ladder.config import model_config
from ladder.infer.bench import random_model
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling, draws
from ladder.parallel import launch


def go():
    dev = launch.join("cuda")
    for plan in ("standard", "ladder"):
        cfg = model_config({"name": "llama-3-8b", "num_layers": 8}, plan)
        e = Engine(random_model(cfg, "push", 4, dev))
        with torch.inference_mode():
            s = e.session(1, 1152, Sampling())
            s.prefill([[5] * 1024], draws(Sampling(), 1, 100))
            for _ in range(20):
                s.step()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                for _ in range(5):
                    s.step()
                torch.cuda.synchronize()
        if launch.rank() == 0:
            ev = [x for x in p.events() if x.device_type == torch.autograd.DeviceType.CUDA]
            ev.sort(key=lambda x: x.time_range.start)
            n = len(ev) // 5
            one = ev[2 * n : 3 * n]
            t0 = one[0].time_range.start
            print(plan, "kernels per step", n, "span us", one[-1].time_range.end - t0)
            for x in one[:60] + one[-40:]:
                print(
                    f"{x.time_range.start - t0:8.1f} {x.time_range.end - x.time_range.start:6.1f} {x.name[:70]}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(launch.run(go, (), 4))
