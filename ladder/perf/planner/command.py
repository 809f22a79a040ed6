"""What `ladder predict MODEL` does with its options."""

from __future__ import annotations

import json
from typing import Any

from ladder.files import check_names_file, write_text
from ladder.models.errors import UserError
from ladder.perf.planner import report
from ladder.perf.planner.candidates import ask
from ladder.perf.planner.question import BATCHES, Question, divided, recommended
from ladder.perf.planner.remedies import nothing_fits
from ladder.perf.planner.running import commands, lacking
from ladder.perf.planner.subject import machines, subject, weights_of

CONTEXT = 1024  # unless the user gives one


def main(options: Any) -> int:
    for name in ("page", "trace"):
        path = getattr(options, name)
        if path is not None:
            check_names_file(path, f"--{name}")
    if options.page and options.trace and options.page.resolve() == options.trace.resolve():
        raise UserError(f"--page={options.page} and --trace={options.trace} are one file; name two")
    question = question_of(options)
    rows, left_out = ask(question)
    best = recommended(rows, question.objective)
    if options.page is not None:
        from ladder.perf.planner.page import as_page

        write_text(options.page, as_page(question, rows, left_out, best))
    if options.trace is not None:
        from ladder.perf.planner.trace import write_trace

        if best is None:
            raise UserError(f"--trace is of what is recommended; {nothing_fits(question, rows)}")
        write_trace(options.trace, best, question.phase)
    if options.json:
        print(json.dumps(report.as_data(question, rows, left_out, best), indent=1))
        return 0
    print(report.text(question, rows, left_out, best))
    named = report.named(question, rows, best)
    for said in lacking(question, named):
        print(said)
    for each in commands(question, named):
        print(f"next: {each}")
    if best is None:
        print(nothing_fits(question, rows))
    return 0


def question_of(options: Any) -> Question:
    known = machines(options.machine, options.calibrate or ())
    about, phase = subject(options.model), options.phase or "decode"
    objective = options.objective or ("throughput" if phase == "train" else "latency")
    if options.tp_degree == 0:
        raise UserError("--tp-degree=0 must be 1 or more; leave it out for that of --tp")
    several = BATCHES[phase] if objective == "throughput" else (1,)
    usual = divided(several, options.micro_batch) or (options.micro_batch,)
    return Question(
        subject=about,
        machines=known,
        phase=phase,
        batches=tuple(options.batch or usual),
        context=options.context
        if options.context is not None
        else min(CONTEXT, about.shape.max_seq_len),
        plans=tuple(options.plans or ()),
        tp=tuple(options.tp or ()),
        tp_degree=options.tp_degree,
        reducers=tuple(dict.fromkeys(options.reducers or ())),
        layouts=tuple(options.layouts or ()),
        micro_batch=options.micro_batch,
        checkpointing=options.activation_checkpointing,
        nodes=options.nodes,
        objective=objective,
        jitter=options.jitter / 100,
        weights=weights_of(about, options.weights),
        cache=options.cache,
    )
