"""Take one wait, record or release away at a time: some test must notice each.

Run by `make mutants`. A mutant is a text of the package and what stands in its place;
the tests run in a copy of the package that differs in this text alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CORE = "axolotl/integrations/protrain/core"
TESTS = ROOT / "tests/protrain/core"
SLOWEST_S = 300
"""A mutant that takes longer hangs, which somebody would notice too."""

QUEUES = ("test_schedules.py", "test_races.py")
SESSIONS = ("test_races.py", "test_state.py", "test_simulated.py")
WORKER = ("test_runtime.py",)
DEFERRED = ("test_deferred.py",)
FOLDERS = ("test_checkpoint.py",)
SNAPSHOTS = ("test_snapshots.py",)
ACCESS = ("test_access.py",)
LOOKS = tuple(
    f"test_ranks.py::test_equals_plain_ddp[2-{case}]" for case in ("B-looks", "C-looks")
)
RANKS = tuple(
    f"test_ranks.py::test_equals_plain_ddp[2-{case}]"
    for case in ("B-slow", "C-slow", "B-skips", "C-skips", "C-mixed")
)
MEASURED = tuple(
    f"test_hardware.py::{test}"
    for test in (
        "test_a_damaged_file_is_measured_again_and_replaced",
        "test_what_nothing_can_be_planned_with_is_measured_again",
        "test_the_tightest_cgroup_counts",
        "test_the_tightest_quota_counts",
        "test_pages_of_files_are_told_from_memory",
    )
)
TIES = ("test_session.py::test_what_shares_bytes_goes_on_sharing_them",)
AHEAD = ("../test_service.py::test_the_next_adapter_comes_while_one_computes",)
SENT = (
    "../test_saving.py::"
    "test_what_sends_checkpoints_waits_for_them_and_training_does_not"
)
BEFORE_LOADING = (
    "../test_bad_input.py::test_too_small_a_budget_is_refused_before_loading[device]",
    "../test_bad_input.py::test_what_depends_on_rates_is_left_to_the_loaded_model",
)


class Mutant(NamedTuple):
    """`source` must stand in `file` exactly once."""

    meaning: str
    file: str
    source: str
    replacement: str
    tests: tuple[str, ...] = QUEUES


SLOTS, PAGER = "engine/slots.py", "engine/pager.py"
UPDATES, HOOKS = "engine/worker.py", "engine/hooks.py"
GRADIENTS, NOTED = "engine/gradients.py", "engine/optimizer.py"
MAKING, PENDING = "engine/apply.py", "engine/pending.py"
SESSION, VIEWING = "engine/session.py", "engine/full_params.py"
SWAP, REDUCTION = "engine/swap.py", "engine/reduction.py"
ROWS = "engine/embedding.py"
STAGING = "engine/staging.py"
CACHE = "planner/cache.py"
CHECKPOINT, FAULTS = "checkpoint/folders.py", "checkpoint/faults.py"
SNAPSHOT, MANIFEST = "checkpoint/snapshots.py", "manifest.py"
PLUGIN, TRAINER, LIVE = "../plugin.py", "../trainer.py", "../service/live.py"

STAND_INS, HOST_CHUNKS = "engine/offloaded_grad.py", "engine/host_chunks.py"
MUTANTS = (
    Mutant(
        "a fetch does not wait for the last use of its slot",
        SLOTS,
        "        stream.wait(self._last_use)\n",
        "",
    ),
    Mutant(
        "rows are looked up into memory from which others still leave",
        ROWS,
        "            self._copied.synchronize()\n",
        "            pass\n",
        ("test_rows.py",),
    ),
    Mutant(
        "buffers grow to what lies outside of blocks",
        PENDING,
        "            if own.host.chunk.block is not None\n            and own.changes",
        "            if own.changes",
        (
            "../test_looked_up.py::"
            "test_where_the_whole_weight_has_no_room[trained by ranks]",
        ),
    ),
    Mutant(
        "compute does not wait for rows",
        ROWS,
        "        device.compute.copy(rows",
        "        device.fetch.copy(rows",
        ("test_rows.py",),
    ),
    Mutant(
        "rows are looked up before the update of their weight has landed",
        SESSION,
        "(updates.land if looked_up else updates.use)(chunk.index)",
        "(id if looked_up else updates.use)(chunk.index)",
        ("test_rows.py",),
    ),
    Mutant(
        "rows are looked up in place of those of another weight",
        ROWS,
        "_Answering(self._weight, ",
        "_Answering(self._module.weight, ",
        ACCESS,
    ),
    Mutant(
        "rows of padding that is counted from the end have a gradient",
        ROWS,
        "padding_idx % size",
        "padding_idx",
        ("test_rows.py",),
    ),
    Mutant(
        "rows are looked up whatever else is asked of them",
        ROWS,
        'if kwargs["max_norm"] is None and not other_gradient:',
        "if not None:",
        ("test_rows.py",),
    ),
    Mutant(
        "norms leave out parameters that were replaced",
        SESSION,
        "[*self.model.parameters()], max_norm",
        "[*self._params.values()], max_norm",
        ACCESS,
    ),
    Mutant(
        "adapters whose state waits are not updated where nothing pages",
        SESSION,
        "            or any(host.chunk.block is not None for host in self._host_chunks)\n",
        "",
        ("test_races.py",),
    ),
    Mutant(
        "a fetch does not wait for the first poison of its slot",
        SLOTS,
        "        device.compute.fill(buffer, POISON_BYTE)\n"
        "        self._last_use = device.compute.record()\n",
        "        self._last_use = device.compute.record()\n"
        "        device.compute.fill(buffer, POISON_BYTE)\n",
    ),
    Mutant(
        "compute does not wait for the copy into a slot",
        SLOTS,
        "            self._device.wait_stalled(self._arrival)\n",
        "            pass\n",
    ),
    Mutant(
        "the arrival is recorded before the copy",
        SLOTS,
        "        stream.copy(part, source)\n"
        "        if part is whole:\n"
        "            return stream.record()\n",
        "        arrival = stream.record()\n"
        "        stream.copy(part, source)\n"
        "        if part is whole:\n"
        "            return arrival\n",
    ),
    Mutant(
        "the end of a use is not recorded",
        SLOTS,
        "        self._device.end_use(self.buffer)\n"
        "        self._last_use = self._device.compute.record()\n",
        "        self._device.end_use(self.buffer)\n",
    ),
    Mutant(
        "a load through the parameters is not recorded",
        SLOTS,
        "        self._last_use = self._device.compute.record()\n"
        "        self.holds = None\n",
        "        self.holds = None\n",
    ),
    Mutant(
        "a load through the parameters leaves a slot current",
        SLOTS,
        "        self._last_use = self._device.compute.record()\n"
        "        self.holds = None\n",
        "        self._last_use = self._device.compute.record()\n",
    ),
    Mutant(
        "a window closes without the end of its uses",
        PAGER,
        "            slot.end_use()\n",
        "            pass\n",
    ),
    Mutant(
        "a missing chunk does not wait for its update",
        PAGER,
        "                self._wait_update(chunk)\n",
        "",
    ),
    Mutant(
        "a chunk is fetched ahead of its update",
        PAGER,
        "            if self._update_pending(chunk):\n",
        "            if False:\n",
    ),
    Mutant(
        "an open window is not closed before the next",
        PAGER,
        "            self.close(self.window)\n        for chunk, slot",
        "            pass\n        for chunk, slot",
    ),
    Mutant(
        "a load finds a window open",
        PAGER,
        "        self.close_any()\n        for slot in self._slots:\n",
        "        for slot in self._slots:\n",
        (*QUEUES, "test_runtime.py"),
    ),
    Mutant(
        "gradients are sent before compute has made them",
        GRADIENTS,
        "        stream.wait(self._device.compute.record())\n",
        "",
    ),
    Mutant(
        "gradients are let go of before they are sent",
        GRADIENTS,
        "        event, _gradients = self._in_flight.popleft()\n"
        "        event.synchronize()\n",
        "        event, _gradients = self._in_flight.popleft()\n",
    ),
    Mutant(
        "a step does not wait for gradients on their way",
        GRADIENTS,
        "        while self._in_flight:\n            self._retire()\n",
        "",
    ),
    Mutant(
        "weights are refreshed before their update",
        SESSION,
        "            self._worker.wait(index)\n",
        "",
        SESSIONS,
    ),
    Mutant(
        "a load does not wait for copies",
        SESSION,
        "        self.settle()\n        self.device.synchronize()\n        self.device.writes",
        "        self.settle()\n        self.device.writes",
        SESSIONS,
    ),
    Mutant(
        "a load does not wait for updates",
        SESSION,
        "        self.settle()\n        self.device.synchronize()\n        self.device.writes",
        "        self.device.synchronize()\n        self.device.writes",
        SESSIONS,
    ),
    Mutant(
        "a reader of the state does not wait for updates",
        SESSION,
        "        self.settle()\n        self.device.reads(host)\n",
        "        self.device.reads(host)\n",
        SESSIONS,
    ),
    Mutant(
        "memory is unpinned under a copy",
        SESSION,
        "            undo.callback(self.device.synchronize)\n",
        "",
        SESSIONS,
    ),
    Mutant(
        "slots are released in a window",
        SESSION,
        "            undo.callback(self._pager.close_any)\n",
        "",
        ("test_faults.py",),
    ),
    Mutant(
        "an update leaves its slot current",
        SESSION,
        "            self._pager.forget(self._ring.numbers[index])\n",
        "            pass\n",
        ("test_optimizer.py::test_training_is_that_of_adamw",),
    ),
    Mutant(
        "saved tensors are sent before compute has made them",
        SWAP,
        "        device.offload.wait(device.compute.record())\n",
        "",
    ),
    Mutant(
        "saved tensors are let go of before they are sent",
        SWAP,
        "            self._leaving.append((event, source))\n",
        "            pass\n",
    ),
    Mutant(
        "memory of saved tensors is given back while they are sent",
        SWAP,
        "            self.device.compute.wait(event)\n",
        "            pass\n",
    ),
    Mutant(
        "saved tensors come back into memory that compute uses",
        SWAP,
        "        device.fetch.wait(device.compute.record())\n",
        "",
    ),
    Mutant(
        "compute does not wait for saved tensors",
        SWAP,
        "        self.fetch()\n        self.life.arrive(self._device)\n",
        "        self.fetch()\n",
    ),
    Mutant(
        "memory of saved tensors ends under the copy into it",
        SWAP,
        "            life.arrive(self.device)\n",
        "            pass\n",
    ),
    Mutant(
        "a region is filled again while its tensors are wanted",
        SWAP,
        "region for region in regions if not region.wanted",
        "region for region in regions",
        (*QUEUES, "test_policies.py"),
    ),
    Mutant(
        "a storage that has changed is not sent again",
        SWAP,
        "        return self._original() is storage and self._version == version\n",
        "        return self._original() is storage\n",
        ("test_policies.py::test_a_storage_that_changes_is_sent_again",),
    ),
    Mutant(
        "an update does not wait for the chunk's last one",
        UPDATES,
        "        if changes is not None:\n            self.wait(changes)\n",
        "",
        WORKER,
    ),
    Mutant(
        "a block's forward leaves its window open",
        HOOKS,
        "            pager.close(index, direction)\n",
        "",
        SESSIONS,
    ),
    Mutant(
        "a gather does not wait for this rank's copy",
        SLOTS,
        "        gathers.wait(stream.record())\n",
        "",
        RANKS,
    ),
    Mutant(
        "a gathered chunk counts as there once it is copied",
        SLOTS,
        "        gathers.call(partial(self._ranks.all_gather, whole, part), (whole,))\n"
        "        return gathers.record()\n",
        "        copied = stream.record()\n"
        "        gathers.call(partial(self._ranks.all_gather, whole, part), (whole,))\n"
        "        return copied\n",
        RANKS,
    ),
    Mutant(
        "ranks begin a sharded pass without each other",
        PAGER,
        "            self._meet()\n",
        "            pass\n",
        ("test_ranks.py::test_who_runs_no_block_is_named_by_all_others[forward-1-2]",),
    ),
    Mutant(
        "what shares bytes is in two chunks",
        "layout/chunks.py",
        "    kept |= {id(tensor) for group in together for tensor in group}\n",
        "",
        TIES,
    ),
    Mutant(
        "what shares bytes is placed apart",
        "engine/param_store.py",
        "            together.update(members)\n",
        "",
        TIES,
    ),
    Mutant(
        "hooks of a step are shown nothing",
        VIEWING,
        "        return self.weights() if all_look else nullcontext()\n",
        "        return nullcontext()\n",
        ACCESS,
    ),
    Mutant(
        "a hook of a tensor finds no sum",
        STAND_INS,
        "        if param.grad is None or is_last:\n",
        "        if index is not None:\n",
        ACCESS,
    ),
    Mutant(
        "blocks that a rank leaves out are not gathered",
        PAGER,
        "            self._pass(self._until(block)[:-1])\n",
        "            pass\n",
        RANKS,
    ),
    Mutant(
        "blocks left out at the end of backward are not gathered",
        PAGER,
        "queue_callback(self.complete)\n",
        "queue_callback(self.close_any)\n",
        RANKS,
    ),
    Mutant(
        "a reduction does not wait for its gradients",
        REDUCTION,
        "        communicate.wait(device.compute.record())\n",
        "",
        RANKS,
    ),
    Mutant(
        "averages leave before they are there",
        REDUCTION,
        "        offload.wait(communicate.record())\n",
        "",
        RANKS,
    ),
    Mutant(
        "averages arrive over gradients of an update that runs",
        REDUCTION,
        "        self._worker.wait(host.chunk.index)\n",
        "",
        ("test_ranks.py::test_equals_plain_ddp[2-B-host-skips]",),
    ),
    Mutant(
        "a fetch does not wait for the shards of other ranks",
        UPDATES,
        "        if others is not None:\n            others.wait()\n",
        "",
        RANKS,
    ),
    Mutant(
        "a cache file that was changed by hand is planned with",
        CACHE,
        'if content["hash"] == _hash(content["measured"]):',
        "if True:",
        MEASURED,
    ),
    Mutant(
        "a deeply nested cache file ends the run",
        CACHE,
        "LookupError, TypeError, RecursionError)",
        "LookupError, TypeError)",
        MEASURED,
    ),
    Mutant(
        "limits of the cgroups above are not seen",
        "host.py",
        "(below, *below.parents)",
        "(below,)",
        MEASURED,
    ),
    Mutant(
        "a container's quota of processors is not seen",
        "host.py",
        "if quota.isdigit():",
        "if not quota:",
        MEASURED,
    ),
    Mutant(
        "weights that are pages of files are taken to free memory",
        "host.py",
        " if file_of(t, files) is not None",
        " if t is None",
        MEASURED,
    ),
    Mutant(
        "a YAML is left to Axolotl's validation",
        PLUGIN,
        "            require_sound(cfg)\n",
        "",
        (
            "../test_bad_input.py::"
            "test_a_misspelt_class_is_refused_with_all_else[ProtrainPlugin]",
        ),
    ),
    Mutant(
        "an alias counts as one value",
        "../offline/yaml_file.py",
        "self._sizes[id(node)] if is_alias else 1",
        "1",
        ("../test_bad_input.py::test_a_yaml_that_cannot_be_read[bomb]",),
    ),
    Mutant(
        "fused LoRA layers stay on without a GPU",
        "../planning.py",
        "        cfg.update(dict.fromkeys(kernels, False))\n",
        "",
        (
            "../test_bad_input.py::"
            "test_what_axolotl_chooses_for_a_gpu_is_switched_off_without_one",
        ),
    ),
    Mutant(
        "a budget is looked at once the base is loaded",
        "../plugin.py",
        "            require_plan(cfg, device, LOG, ranks)\n",
        "",
        BEFORE_LOADING,
    ),
    Mutant(
        "a budget is refused where measured rates decide",
        "../before_loading.py",
        "            if _depends_on_rates(args, subject, hardware):\n",
        "            if args is None:\n",
        BEFORE_LOADING,
    ),
    Mutant(
        "a checkpoint is written under its name",
        CHECKPOINT,
        "    return checkpoint.parent / STAGING / checkpoint.name\n",
        "    return checkpoint\n",
        FOLDERS,
    ),
    Mutant(
        "what a checkpoint replaces goes before it has the name",
        CHECKPOINT,
        "        checkpoint.rename(aside / checkpoint.name)\n",
        "        shutil.rmtree(checkpoint)\n",
        FOLDERS,
    ),
    Mutant(
        "what was moved aside is not put back",
        CHECKPOINT,
        "                aside.rename(run_dir / aside.name)\n",
        "                pass\n",
        FOLDERS,
    ),
    Mutant(
        "a save that fails leaves its files",
        CHECKPOINT,
        "        if publishes:\n            restore(run_dir)\n",
        "",
        FOLDERS,
    ),
    Mutant(
        "training changes what a save has still to write",
        SNAPSHOT,
        "                copy = copy.clone()\n",
        "                pass\n",
        SNAPSHOTS,
    ),
    Mutant(
        "copies of a save take more than their room",
        SNAPSHOT,
        "            if nbytes > self._room:\n",
        "            if False:\n",
        SNAPSHOTS,
    ),
    Mutant(
        "moments of another shape are loaded",
        FAULTS,
        "not isinstance(value, Tensor) or value.shape != param.shape",
        "not isinstance(value, Tensor)",
        FOLDERS,
    ),
    Mutant(
        "moments that are not finite are loaded",
        FAULTS,
        "        if not math.isfinite(high - low):\n",
        "        if False:\n",
        FOLDERS,
    ),
    Mutant(
        "moments in another order of bytes are loaded",
        FAULTS,
        "        if param.is_contiguous() and not value.is_contiguous():\n",
        "        if False:\n",
        FOLDERS,
    ),
    Mutant(
        "a schedule that is missing begins anew",
        FAULTS,
        "        required += has\n",
        "        required += [OPTIMIZER]\n",
        FOLDERS,
    ),
    Mutant(
        "a run resumes from half a checkpoint",
        PLUGIN,
        "            if fault is None:\n",
        "            if True:\n",
        ("../test_resuming.py",),
    ),
    Mutant(
        "a checkpoint is pushed before it has its name",
        TRAINER,
        """                patch.object(self, "_push_from_checkpoint", lambda _folder: None),\n""",
        "",
        ("../test_saving.py::test_a_push_sees_whole_checkpoints_by_their_names",),
    ),
    Mutant(
        "a checkpoint is sent before it has its name",
        TRAINER,
        """        if event == "on_save" and self.protrain.saves_beside:\n""",
        "        if False:\n",
        (SENT,),
    ),
    Mutant(
        "a checkpoint is sent as that of a later step",
        TRAINER,
        "partial(call, state=copy(state))",
        "partial(call, state=state)",
        (SENT,),
    ),
    Mutant(
        "a run resumes from files that have grown or shrunk",
        FAULTS,
        "                return next(sizes, None)\n",
        "                return None\n",
        FOLDERS,
    ),
    Mutant(
        "a second start removes what the first one is writing",
        PLUGIN,
        "                lock, missing = locked(run_dir)\n",
        "                lock, missing = open(os.devnull), ''\n",
        ("../test_resuming.py",),
    ),
    Mutant(
        "a worker keeps the folder of a run that was killed",
        CHECKPOINT,
        "os.register_at_fork(after_in_child=_leave_locks)\n",
        "",
        FOLDERS,
    ),
    Mutant(
        "a link leads out of a checkpoint",
        MANIFEST,
        "    if not is_inside or not stat",
        "    if not stat",
        FOLDERS,
    ),
    Mutant(
        "what was not saved is not missed",
        MANIFEST,
        "        if self.absent is not None:\n            return self.absent\n",
        "        if self.absent is not None:\n            return []\n",
        FOLDERS,
    ),
    Mutant(
        "what is not listed is not named",
        MANIFEST,
        "    others = sorted(_names(folder) - {MANIFEST, *listed.files})\n",
        "    others = []\n",
        FOLDERS,
    ),
    Mutant(
        "a part of a file that differs is not named",
        MANIFEST,
        "                if _hash(file, begin, end) != hashed:\n",
        "                if not hashed:\n",
        FOLDERS,
    ),
    Mutant(
        "the best checkpoint is known by the folder it was written in",
        TRAINER,
        "            if best == final.name or (run_dir / best).exists():\n",
        "            if (run_dir / best).exists():\n",
        ("../test_saving.py::test_the_best_checkpoint_is_that_of_the_plain_run",),
    ),
    Mutant(
        "a gradient on the host has no stand-in",
        STAND_INS,
        "        self.put(index)\n        return gradient\n",
        "        self.host.params[index].grad = None\n        return gradient\n",
        ACCESS,
    ),
    Mutant(
        "the memory of a gradient that somebody keeps is used again",
        STAND_INS,
        "            if lent() is not None:\n",
        "            if index is None:\n",
        ACCESS,
    ),
    Mutant(
        "a gradient that was set to None is updated with",
        STAND_INS,
        "                self.host.sums.present.discard(index)\n",
        "                pass\n",
        ACCESS,
    ),
    Mutant(
        "a sum that was set to None between micro-batches grows on",
        STAND_INS,
        "                drop(index)\n",
        "                pass\n",
        ACCESS,
    ),
    Mutant(
        "a pass begins on weights that somebody has replaced",
        VIEWING,
        "            self.residence.verify()\n",
        "            pass\n",
        ACCESS,
    ),
    Mutant(
        "what is shown is taken for written after an update",
        NOTED,
        "        self._around.hide()\n        self._settle()\n",
        "        self._settle()\n",
        ACCESS,
    ),
    Mutant(
        "somebody looks while updates are queued",
        SESSION,
        "        self._worker.drain()\n        self._updates.settle_gradients()\n"
        "        self.ready()\n        # copies to slots",
        "        # copies to slots",
        ACCESS,
    ),
    Mutant(
        "a module below is copied as its slot is",
        HOOKS,
        "        self._copying()\n        return Hook(_nothing)\n",
        "        return Hook(_nothing)\n",
        ACCESS,
    ),
    Mutant(
        "all ranks write one copy",
        "runtime/arena.py",
        "        if not self._files:\n            return self\n",
        "        if self:\n            return self\n",
        LOOKS,
    ),
    Mutant(
        "a rank takes over what others still read",
        VIEWING,
        "            # nobody of the node looks any longer\n"
        "            self.ranks.node_sum(torch.zeros(1))\n",
        "",
        LOOKS,
    ),
    Mutant(
        "a second backward overwrites what is on its way",
        REDUCTION,
        "            if self._number[host] < self._next or index in host.sums.arrived:\n",
        "            if index is None:\n",
        ("test_ranks.py::test_two_backward_passes_at_once_are_refused[2-twice]",),
    ),
    Mutant(
        "who asks for gradients takes those of the step",
        GRADIENTS,
        "            if accumulates:\n",
        "            if backward:\n",
        ACCESS,
    ),
    Mutant(
        "a gradient that is set meets one on its way",
        STAND_INS,
        "                settle()\n",
        "                pass\n",
        ACCESS,
    ),
    Mutant(
        "a gradient that is set meets an update that runs",
        STAND_INS,
        "                wait()\n",
        "                return\n",
        ACCESS,
    ),
    Mutant(
        "a gradient is used by two updates",
        STAND_INS,
        "        if index in self._spent:\n",
        "        if index is None:\n",
        ACCESS,
    ),
    Mutant(
        "a stand-in stays where its parameter was",
        STAND_INS,
        "        if self.stand_ins[index].device != param.device:\n",
        "        if index is None:\n",
        ACCESS,
    ),
    Mutant(
        "weights are hidden after a block alone",
        "engine/hooks.py",
        "            self._ended()\n",
        "",
        ACCESS,
    ),
    Mutant(
        "a recomputation runs without hooks of before",
        "engine/hooks.py",
        "self._inner or self._module._call_impl",
        "self._inner or self._module.forward",
        ("test_hooks.py",),
    ),
    Mutant(
        "a block that is compiled in training is called without its window",
        SESSION,
        "                handle.require_bound()\n",
        "                pass\n",
        ("test_hooks.py",),
    ),
    Mutant(
        "a block's own input is changed while it is on its way",
        "runtime/recompute.py",
        "        if _versions(given) != versions:\n",
        "        if versions is None:\n",
        ("test_hooks.py",),
    ),
    Mutant(
        "a second-order pass reads slots",
        "engine/hooks.py",
        "        _require_first_order(self._index, self._pager)\n",
        "",
        ACCESS,
    ),
    Mutant(
        "a plan takes what is shown for its places",
        "session.py",
        "        self._viewer.hide()\n        self.forget_gradients()\n",
        "        self.forget_gradients()\n",
        ACCESS,
    ),
    Mutant(
        "clipping hides what is shown",
        "session.py",
        "        self._viewer.show_again()\n        return norm\n",
        "        return norm\n",
        ACCESS,
    ),
    Mutant(
        "weights transposed where they are do not count",
        "engine/param_store.py",
        "_lies(now) == _lies(place)",
        "now.data_ptr() == place.data_ptr()",
        ACCESS,
    ),
    Mutant(
        "a staging buffer is filled while it is used",
        STAGING,
        "        for event in buffer.busy:\n            stream.wait(event)\n",
        "",
        DEFERRED,
    ),
    Mutant(
        "new staging memory is filled while compute still uses it",
        STAGING,
        "        buffer.busy = [self._device.compute.record()]\n        return buffer\n",
        "        return buffer\n",
        DEFERRED,
    ),
    Mutant(
        "compute does not wait for what comes through staging",
        STAGING,
        "        self._device.wait_stalled(buffer.arrival)\n",
        "",
        DEFERRED,
    ),
    Mutant(
        "what is staged has not come to the host yet",
        STAGING,
        "                stream.wait(source.after)\n",
        "                pass\n",
        DEFERRED,
    ),
    Mutant(
        "a smaller staging buffer ends under its copy",
        STAGING,
        "                event.synchronize()\n            idle.remove(small)\n",
        "                pass\n            idle.remove(small)\n",
        DEFERRED,
    ),
    Mutant(
        "staging memory ends while it is used",
        STAGING,
        "not buffer.in_use and all(event.query() for event in buffer.busy)",
        "not buffer.in_use",
        DEFERRED,
    ),
    Mutant(
        "half of a filling counts as all of it",
        STAGING,
        "        buffer.holds, buffer.parts, start = None, [], 0\n",
        "        buffer.holds, buffer.parts, start = key, [], 0\n",
        DEFERRED,
    ),
    Mutant(
        "a fetch does not wait for updated weights on their way home",
        SLOTS,
        "            stream.wait(self._sent)\n",
        "            pass\n",
        DEFERRED,
    ),
    Mutant(
        "weights go home before compute has updated them",
        SLOTS,
        "    device.offload.wait(device.compute.record())\n    device.offload.copy(home",
        "    device.offload.copy(home",
        DEFERRED,
    ),
    Mutant(
        "a staging buffer is given back while its state leaves",
        MAKING,
        "        self._give_back(own, [event, own.left])\n",
        "        self._give_back(own)\n",
        DEFERRED,
    ),
    Mutant(
        "a state that an update has made ends under its copy",
        MAKING,
        "        self._leaving.append((own.left, change))\n",
        "",
        DEFERRED,
    ),
    Mutant(
        "a state that an update has made is let go of under its copy",
        MAKING,
        "        event, _change = self._leaving.popleft()\n        event.synchronize()\n",
        "        event, _change = self._leaving.popleft()\n",
        DEFERRED,
    ),
    Mutant(
        "who reads the state finds updates on their way home",
        PENDING,
        "            self.flush_chunk(own.host.chunk.index)\n"
        "        self._with_device.settle()\n",
        "            self.flush_chunk(own.host.chunk.index)\n",
        DEFERRED,
    ),
    Mutant(
        "an interrupted update leaves a half-made state",
        MAKING,
        "            undo()\n",
        "",
        DEFERRED,
    ),
    Mutant(
        "an interrupted update leaves half-made weights",
        MAKING,
        "            weights.spoilt()\n            raise\n",
        "            raise\n",
        DEFERRED,
    ),
    Mutant(
        "a handler's update begins with what is half made",
        MAKING,
        "            own.undo()\n            self._give_back(own)\n"
        "            if weights is not None:\n"
        "                weights.spoilt()\n",
        "            pass\n",
        DEFERRED,
    ),
    Mutant(
        "an update that is cut off on its way home is made again",
        PENDING,
        "        self._with_device.finish()\n",
        "        pass\n",
        DEFERRED,
    ),
    Mutant(
        "an update goes by later hyper-parameters",
        "optim/noted.py",
        "        key: value.clone() if isinstance(value, Tensor) else value\n",
        "        key: value\n",
        DEFERRED,
    ),
    Mutant(
        "a sum leaves over the one that is still coming",
        GRADIENTS,
        "            self._device.offload.wait(fetched)\n",
        "            pass\n",
        DEFERRED,
    ),
    Mutant(
        "a sum comes before it has left",
        GRADIENTS,
        "    return Source(sums.memory, sums.sent)\n",
        "    return Source(sums.memory, None)\n",
        DEFERRED,
    ),
    Mutant(
        "memory of weights that are updated aside ends on their way home",
        MAKING,
        '        self._staging.give_back(("weights", own.host.chunk.index), busy)\n',
        '        self._staging.give_back(("weights", own.host.chunk.index))\n',
        DEFERRED,
    ),
    Mutant(
        "a slot stays current though its chunk was updated aside",
        PENDING,
        "            self._around.rewrites(own.host)\n",
        "            pass\n",
        DEFERRED,
    ),
    Mutant(
        "the host updates weights that are being fetched",
        MAKING,
        "        fetches.synchronize()\n",
        "",
        SESSIONS,
    ),
    Mutant(
        "the optimizer's state is read during updates",
        NOTED,
        "        self.updates.flush()\n        self.updates.require_gathered()\n",
        "        self.updates.require_gathered()\n",
        (*SESSIONS, *DEFERRED),
    ),
    Mutant(
        "the optimizer's state is loaded during updates",
        NOTED,
        "        self.flush()\n        mains",
        "        mains",
        ("test_races.py::test_loading_the_optimizer_waits_for_updates",),
    ),
    Mutant(
        "norms leave out gradients that other ranks still add to",
        NOTED,
        "        self._settle()\n        self._share_norms()\n",
        "        self._share_norms()\n",
        RANKS,
    ),
    Mutant(
        "a step without clipping does not settle",
        NOTED,
        "        self._settle()\n        self.flush()\n",
        "        self.flush()\n",
        (*SESSIONS, "test_optimizer.py"),
    ),
    Mutant(
        "averages are used before they arrive",
        REDUCTION,
        "        self._settle_own()\n        if not reduces:\n",
        "        if not reduces:\n",
        RANKS,
    ),
    Mutant(
        "weights are fetched before other ranks have updated theirs",
        PENDING,
        "        return self._ranks.updated()\n",
        "        return None\n",
        RANKS,
    ),
    Mutant(
        "weights count as updated on their way home",
        PENDING,
        "        event.synchronize()\n",
        "        pass\n",
        RANKS,
    ),
    Mutant(
        "the norm of another rank's gradient is left out",
        NOTED,
        "            self._ranks.node_sum(of_others), known, strict=True\n",
        "            of_others, known, strict=True\n",
        RANKS,
    ),
    Mutant(
        "a rank saves the state of its own weights alone",
        NOTED,
        "        self._states.update(others)\n",
        "",
        ("test_ranks.py::test_modes_and_numbers_of_ranks_continue_one_curve",),
    ),
    Mutant(
        "slots keep what they held before somebody wrote",
        VIEWING,
        "            pager.forget_all()\n",
        "",
        ACCESS,
    ),
    Mutant(
        "masters do not hear of what somebody wrote",
        SESSION,
        "                host.masters.renew(where)\n",
        "                pass\n",
        ACCESS,
    ),
    Mutant(
        "compute does not wait for an adapter that was fetched ahead",
        LIVE,
        "        self._device.wait_stalled(self._place.arrival)\n"
        "        self._device.reads",
        "        self._device.reads",
        AHEAD,
    ),
    Mutant(
        "an adapter comes before it has gone home",
        LIVE,
        "        stream.wait(self._sent)\n",
        "",
        AHEAD,
    ),
    Mutant(
        "an adapter goes home before compute has updated it",
        LIVE,
        "        stream.wait(self._device.compute.record())\n",
        "",
        AHEAD,
    ),
    Mutant(
        "what training does not need is taken from evaluations too",
        "planner/memory.py",
        "return activations + self.hardware.unneeded_bytes",
        "return activations",
        ("test_planner.py::test_an_evaluation_keeps_what_training_did_not_need",),
    ),
)


def run(mutant: Mutant) -> tuple[str, float]:
    """The test that notices, empty if none does, and seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) / "src"
        shutil.copytree(ROOT / "src", overlay)
        file = overlay / CORE / mutant.file
        text = file.read_text("utf-8")
        if text.count(mutant.source) != 1:
            raise SystemExit(
                f"{mutant.meaning}: its source stands {text.count(mutant.source)} "
                f"times in {mutant.file}; change the list in {Path(__file__).name}"
            )
        file.write_text(text.replace(mutant.source, mutant.replacement), "utf-8")
        tests = [str(TESTS / name) for name in mutant.tests]
        env = {**os.environ, "PYTHONPATH": str(overlay), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            result = subprocess.run(
                [*command, *tests, "-m", "", "-k", "not predicted"],
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                timeout=SLOWEST_S,
            )
        except subprocess.TimeoutExpired:
            return "hangs", time.perf_counter() - start
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    caught = failed[0].split("::")[1].split(" - ")[0] if failed else ""
    if result.returncode > 1 or (result.returncode == 1 and not failed):
        raise SystemExit(f"{mutant.meaning}: pytest did not run\n{result.stdout}")
    return caught, time.perf_counter() - start


def main() -> int:
    """Exit code: 1 if a mutant survives. Arguments select mutants by words."""
    chosen = [m for m in MUTANTS if all(w in m.meaning for w in sys.argv[1:])]
    survivors = 0
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2))) as pool:
        for mutant, (caught, seconds) in zip(
            chosen, pool.map(run, chosen), strict=True
        ):
            survivors += not caught
            print(
                f"{mutant.meaning:58} {caught or 'SURVIVES':60} {seconds:4.0f} s",
                flush=True,
            )
    print(f"{len(chosen)} mutants, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
