"""Runs of Sailor (Strati et al., SOSP 2025), from a checkout of github.com/eth-easl/sailor.

``sailor/Planner/simulations/validation`` has a layout with its measured iteration (``real``) in
each file: of OPT-350M and GPT-Neo 2.7B on GH200 (Alps Clariden), and of OPT-350M on a mixed cluster
(MIT). Layer times are those of ``simulations/profiles_tmp.json``, which the authors' own validation
reads; links those of ``providers/network_coeffs_all_homo.json``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.published.host_time import HostTime
from benchmarks.published.run import PublishedRun, Source
from benchmarks.published.sailor_files import SailorOptions, read_sailor, read_sailor_links
from planner.cluster.cluster import Cluster
from planner.job import Job
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import GraphRecord
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.plan.runtime_rules import RULES
from planner.records.document import read_json

FOLDER = "sailor"
PLANNER = Path("sailor/Planner")
PROFILES = PLANNER / "simulations/profiles_tmp.json"
VALIDATION = PLANNER / "simulations/validation"
LINKS = Path("sailor/providers/network_coeffs_all_homo.json")

_CITES = (
    "Strati et al. 2025, Sailor (SOSP), github.com/eth-easl/sailor, MIT licence: iterations in "
    "sailor/Planner/simulations/validation/{folder}, layer times in "
    "sailor/Planner/simulations/profiles_tmp.json, sizes in sailor/Planner/llm_info.json, links in "
    "sailor/providers/network_coeffs_all_homo.json."
)
_STATES = (
    "A device is a tensor-parallel group; the layer times contain its collectives. Gradients are "
    "reduced when all devices have ended: Sailor's DeepSpeed has a barrier before "
    "(deepspeed/pipe_engine.py, _exec_reduce_tied_grads). The optimizer step is predicted with the "
    "memory bandwidth of {preset}.{more}"
)
_HEAD = (
    " GPT-Neo's profile leaves out the product with the vocabulary and the loss over it: for all "
    "but LLaMA the profiler writes layer 5 as the last, which is the final norm of GPTModelPipe "
    "(third_party/Megatron-DeepSpeed, megatron/training.py and megatron/model/gpt_model.py), so "
    "that it takes as long with 4 GPUs as with 1. They are predicted from OPT-350M's, which was "
    "profiled whole on the same GPUs, by the number of parameters and samples."
)
_LAUNCHES = (
    " Where a microbatch has one sample or two, launches limit it: by the profile a forward of a "
    "layer takes as long for two samples as for four, and one sample on four GPUs longer than on "
    "one. Layers were profiled with a synchronisation after each; in a run the host launches on. "
    "What the host takes differs from the profile in both directions, and nothing published says "
    "by how much: 32 microbatches of one sample took 13 % less than the profile, 8 of two samples "
    "8 % more."
)
_ONE_MICROBATCH = (
    " N2/plan_config_N2_D1 is one microbatch of one sample: 208 ms, of which forwards and "
    "backwards of the profile are 125 and copies of its two messages 1. No other row shows what "
    "the rest may be: OPT-350M's of one replica leave 33 ms at most for what happens once an "
    "iteration. Tried and not the reason: the optimizer's step by the profile (15 ms), the shapes "
    "that the first message tells (once a training), the all-reduce of the loss, a second "
    "microbatch (by the authors' formula of memory, 16.3 GB are those of one)."
)
_SLOW_LINK = (
    " A host of RTX-3090 has a link of 0.116 GB/s, 0.145 s a message. Rows with one replica and "
    "the time of reductions that files give (7.2 s in N4/plan_config_N4_D2, just as long as the "
    "link takes) agree with that. The two rows with replicas and two stages, which we predict 21 "
    "and 24 % too long, leave 0.92 and 0.94 s a microbatch for 0.87 s of layers on RTX-3090 and "
    "two messages. So messages would have to travel while that stage computes, or it had fewer "
    "layers than its file lists; the source has every send and receive wait (deepspeed/p2p.py)."
)
RUNTIME = RULES["deepspeed"].model_copy(
    update={
        "name": "deepspeed of sailor",
        "source": "github.com/eth-easl/sailor cf2c8e3, deepspeed/pipe_engine.py, p2p.py, utils.py",
        "behaviour": RULES["deepspeed"].behaviour.model_copy(update={"reduction": "flush"}),
    }
)
COPIES = HostTime(
    where="Sailor's DeepSpeed on GH200",
    figure="message_copy_gb_per_s",
    at_most=1.0,
    because=(
        "Whoever receives makes a tensor of the whole message in the host's memory, copies it to "
        "the GPU, waits for the GPU to read sizes, and gathers the parts of the group "
        "(github.com/eth-easl/sailor, deepspeed/utils.py, reconstruct_tensor)."
    ),
)
GIVES_COPIES = "N4/plan_config_N4_D1"
"""The layout of OPT-350M with one replica, so without a reduction, and with the most messages, so
that what happens once an iteration counts little."""
HEAD_SAMPLES = 64
"""The microbatch from which OPT-350M's head is taken, by sample: the smallest ones are limited by
launches."""


@dataclass(frozen=True)
class Series:
    """Layouts of one model on one cluster.

    Attributes:
        source: what the report says of it.
        model: its name in the profiles.
        folder: below :data:`VALIDATION`.
        preset: nearest to its GPUs.
        head: of a model whose profile leaves it out: its parameters.
        host: what the host adds; None: nothing is known to.
    """

    source: Source
    model: str
    folder: str
    preset: str
    head: int = 0
    host: HostTime | None = None


def _series(
    name: str,
    model: str,
    folder: str,
    preset: str,
    *,
    more: str,
    head: int = 0,
    host: HostTime | None = None,
) -> Series:
    source = Source(
        publication="Sailor",
        name=name,
        cites=_CITES.format(folder=folder),
        states=_STATES.format(preset=preset, more=more),
    )
    return Series(source, model, folder, preset, head, host)


GPT_NEO_HEAD, OPT_HEAD = 50_257 * 2560, 50_304 * 1024
"""Parameters: sailor/Planner/simulations/utils.py has GPT-Neo's, with a norm of 5,120, as the last
of its layers, llm_info.json has OPT-350M's."""
SERIES = (
    _series(
        "OPT-350M on GH200", "OPT-350", "clariden/OPT-350", "H200", more=_LAUNCHES, host=COPIES
    ),
    _series(
        "GPT-Neo 2.7B on GH200",
        "GPT-Neo-2.7",
        "clariden/GPT-NEO",
        "H200",
        more=_HEAD + _ONE_MICROBATCH,
        head=GPT_NEO_HEAD,
        host=COPIES,
    ),
    _series("OPT-350M on RTX", "OPT-350", "mit", "RTX-4090", more=_SLOW_LINK),
)


def runs(data: Path) -> Iterator[PublishedRun]:
    """Yield the rows below a folder of checkouts; none without a checkout of Sailor."""
    root = data / FOLDER
    iterations = _iterations(root / VALIDATION)
    for series in SERIES if root.is_dir() else ():
        files = sorted((root / VALIDATION / series.folder).glob("N*/*.json"), key=_number)
        layouts = [_Layout(root, series, path, read_json(path)) for path in files]
        repeated = Counter((row.data["real"], row.data["max_mem"]) for row in layouts)
        for layout in layouts:
            same = repeated[layout.data["real"], layout.data["max_mem"]] > 1
            yield layout.run(is_repeated=same, iterations=iterations)


def _iterations(folder: Path) -> dict[float, str]:
    """Return the file of each measured iteration."""
    files = (path for series in SERIES for path in (folder / series.folder).glob("N*/*.json"))
    return {
        read_json(path)["real"]: path.relative_to(folder).with_suffix("").as_posix()
        for path in files
    }


def _number(path: Path) -> tuple[int, str]:
    return int(path.parent.name[1:]), path.name


@dataclass(frozen=True)
class _Layout:
    """A file of the validation."""

    root: Path
    series: Series
    path: Path
    data: dict[str, Any]

    @cached_property
    def pipeline(self) -> dict[str, Any]:
        (pipeline,) = self.data["pipeline_list"]
        return dict(pipeline)

    @cached_property
    def groups(self) -> list[tuple[str, int]]:
        """GPU and tensor degree of each group, the replicas of a stage after each other."""
        found = []
        for stage in self.pipeline["tmp_per_stage"]:
            for vms, size in stage:
                ((gpu, _, _),) = vms
                found.append((str(gpu), int(size)))
        return found

    @property
    def name(self) -> str:
        """Folder and file."""
        return f"{self.path.parent.name}/{self.path.stem}"

    @cached_property
    def size(self) -> int:
        (size,) = {size for _, size in self.groups}
        return size

    def run(self, *, is_repeated: bool, iterations: Mapping[float, str]) -> PublishedRun:
        """Return the row.

        Args:
            is_repeated: whether another file has the same measured figures.
            iterations: the file of each measured iteration, of all series.
        """
        graph = self._graph()
        counts = [len(stage) for stage in self.pipeline["layers_per_stage"]]
        fits = sum(counts) == len(graph.layers)
        samples, batch = self.data["mbs"], self.data["gbs"]
        job = Job(
            name=self.series.model,
            samples_per_microbatch=samples,
            microbatches=batch // samples,
            precision="float32",
            backward="whole",
            overlap_reduction=False,
        )
        return PublishedRun(
            source=self.series.source,
            name=f"{self.name}: {'-'.join(map(str, counts))} layers, "
            f"{self.pipeline['dp'][0]} replicas, tensor degree {self.size}, {batch} samples by "
            f"{samples}",
            measured_s=float(self.data["real"]),
            problem=Problem(graph, self._cluster(), job),
            runtime=RUNTIME,
            stages=_stages(list(graph.layers), counts) if fits else (tuple(graph.layers),),
            replicas=int(self.pipeline["dp"][0]),
            contradiction=self._contradiction(
                sum(counts), len(graph.layers), is_repeated, iterations
            ),
            host=self.series.host,
            gives_host=self.series is SERIES[0] and self.name == GIVES_COPIES,
        )

    def _contradiction(
        self, listed: int, layers: int, is_repeated: bool, iterations: Mapping[float, str]
    ) -> str:
        if listed != layers:
            return f"its stages list {listed} layers, the profile of the model has {layers}"
        if is_repeated:
            return (
                "another file has the same measured time and memory for other devices, so that one "
                "of the two was copied"
            )
        if self.data.get("red_grads") in iterations:
            other = iterations[self.data["red_grads"]]
            return f"its time of the reduction is the whole iteration of {other}"
        return ""

    def _graph(self) -> LayerGraph:
        """Return the layers with the times of all GPUs of the layout."""
        graphs = [self._profile(gpu) for gpu in dict.fromkeys(gpu for gpu, _ in self.groups)]
        layers = []
        for rows in zip(*(graph.record.layers for graph in graphs), strict=True):
            measured = {kind: times for row in rows for kind, times in row.measured.items()}
            layers.append(rows[0].model_copy(update={"measured": measured}))
        record = graphs[0].record.model_copy(update={"layers": tuple(layers)})
        if self.series.head:
            record = self._with_head(record)
        return LayerGraph.from_record(record)

    def _with_head(self, record: GraphRecord) -> GraphRecord:
        """Return a graph whose last layer has the head that its profile leaves out."""
        *layers, last = record.layers
        share = self.series.head / OPT_HEAD * self.data["mbs"] / HEAD_SAMPLES
        times = dict(last.measured)
        for gpu in dict.fromkeys(gpu for gpu, _ in self.groups):
            head = self._profile(gpu, "OPT-350", HEAD_SAMPLES).record.layers[-1]
            times |= {kind: _sum(times[kind], row, share) for kind, row in head.measured.items()}
        *others, own = record.parameters
        elements = own.elements + self.series.head
        held = own.model_copy(update={"elements": elements, "bytes": 4 * elements})
        last = last.model_copy(update={"measured": times})
        return record.model_copy(update={"layers": (*layers, last), "parameters": (*others, held)})

    def _profile(
        self, gpu: str, model: str | None = None, samples: int | None = None
    ) -> LayerGraph:
        model, samples = model or self.series.model, samples or int(self.data["mbs"])
        given = {"model": model, "gpu": gpu, "tensor_parallel": str(self.size)}
        options = SailorOptions(self.series.preset, given, samples)
        return read_sailor(self.root / PROFILES, options).graph

    def _cluster(self) -> Cluster:
        given = {
            "hosts": ",".join(gpu for gpu, _ in self.groups),
            "gpus_per_host": str(self.size),
            "tensor_parallel": str(self.size),
        }
        options = SailorOptions(self.series.preset, given=given)
        return read_sailor_links(self.root / LINKS, options).cluster


def _stages(layers: Sequence[str], counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Divide layers by their number; a file names one twice and another not at all."""
    rest = iter(layers)
    return tuple(tuple(next(rest) for _ in range(count)) for count in counts)


def _sum(first: MeasuredTimes, second: MeasuredTimes, share: float) -> MeasuredTimes:
    return MeasuredTimes(
        forward_s=first.forward_s + share * second.forward_s,
        input_gradient_s=first.input_gradient_s + share * second.input_gradient_s,
        weight_gradient_s=first.weight_gradient_s + share * second.weight_gradient_s,
    )
