"""Tests of what in the suite needs neither a GPU nor a package: `python3 -m unittest suite_test` in this folder."""

import inspect
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

try:
    import numpy
except ImportError:
    numpy = None

import images
import plans
import shapes
from phases import beside, kernels
from phases.all import DEFAULT, PHASES
from phases.beside import cases, show
from phases.determinism import determinism
from phases.parity import Comparison, batch_parity
from phases.profile import DURATION, READ, WRITTEN, steps_of
from phases.sanitizer import is_clean
from phases.steps import step_modes
from phases.table import cases as cases_of_table
from phases.table import milliseconds, ratios, replays, table
from recorder import LOG_OUTPUT_MAX, Conversation, Recorder, Skipped, rehearsal_failures

REPOSITORY = Path(__file__).resolve().parent.parent.parent


class Plans(unittest.TestCase):
    def test_every_step_is_a_phase_that_takes_its_options_and_all_fit(self):
        for name, make in plans.PLANS.items():
            plan = make()
            self.assertLessEqual(sum(step.seconds for step in plan.steps), 60 * plans.MINUTES, name)
            for step in plan.steps:
                inspect.signature(PHASES[step.phase]).bind(None, **step.options)
            self.assertTrue(all(model in shapes.SHAPES for model in plan.models))
        self.assertTrue(set(DEFAULT) <= set(PHASES))

    def test_a_step_ends_when_it_and_all_before_have_had_their_time(self):
        plan = plans.Plan([plans.Step("a", 10), plans.Step("b", 5)], [])
        self.assertEqual(plans.deadlines(plan, 100), [110, 115])
        self.assertEqual(plans.deadlines(plan, 100, plans.MINUTES * 2), [120, 130])

    def test_families_that_did_not_pass_are_run_again(self):
        self.assertIsNone(kernels.failed_families({"phases": {}}))
        passed = {family: {"passed": True} for family in kernels.FAMILIES}
        self.assertEqual(kernels.failed_families({"phases": {"kernels": passed}}), [])
        some = {**passed, "rows": {"passed": False}}
        del some["sampling"]
        self.assertEqual(kernels.failed_families({"phases": {"kernels": some}}), ["rows", "sampling"])


class Judged:
    """A suite whose jobs answer what a test says, and that keeps what phases make of it."""

    rehearse = quick = False

    def __init__(self, answer):
        self.answer, self.checks, self.rows, self.json = answer, [], [], {"phases": {}}
        self.recorder = self

    def skip(self, phase, why, what=None):
        self.checks.append((what or phase, False))

    def model(self, name, dtype="bfloat16"):
        return Path(name)

    shape = staticmethod(lambda name: name)

    def job(self, name, path, task, timeout=600, **options):
        answer = self.answer(task, options)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def row(self, *row, **_):
        self.rows.append(row)

    def check(self, phase, what, good, detail=""):
        self.checks.append((what, good))

    def passed(self):
        return bool(self.checks) and all(good for _, good in self.checks)


class ChecksOfChecks(unittest.TestCase):
    """A phase fails when its runs are empty, stale, serial or broken. What the measuring program itself refuses (NaN, results that are
    not written, paths that are off) is tested with it on a simulated GPU: tests/support/gpu/tests/measure.rs."""

    def judge(self, phase, answer):
        suite = Judged(answer)
        phase(suite)
        return suite.passed()

    def test_bits_are_compared_row_by_row(self):
        good = {"ways": 20, "rows": 200, "different": []}
        self.assertTrue(self.judge(determinism, lambda *_: good))
        for wrong in [{"rows": 20}, {"ways": 0, "rows": 0}, {"different": ["in chunks of 7, row 0: 1 of 9 logits"]}]:
            self.assertFalse(self.judge(determinism, lambda *_: {**good, **wrong}), wrong)

    def test_replays_need_equal_digests(self):
        for digests, steps, expected in [(["a", "a"], 1000, True), (["a", "b"], 1000, False), (["a", "a"], 0, False)]:
            answers = iter(digests)
            self.assertEqual(self.judge(replays, lambda *_: {"digest": next(answers), "steps": steps}), expected)

    def test_figures_of_a_run_that_is_refused_are_failures(self):
        refused = lambda *_: RuntimeError("the fast path overlapped_kernels is off")
        for phase in [table, step_modes, batch_parity_of_nothing]:
            self.assertFalse(self.judge(phase, refused), phase)

    def test_a_table_that_is_cut_off_keeps_the_cases_that_it_had_and_is_no_success(self):
        row = {"case": [8, 1024, 1], "device_ms": 2.0}
        suite = Judged(lambda *_: Skipped("cut off", 'WARN x\n' + json.dumps({"partial": row}) + '\n{"part'))
        table(suite)
        self.assertFalse(suite.passed())
        self.assertEqual(suite.json["phases"]["table"]["llama-3.1-8b"]["fast"]["decode"], {"8": 2.0})

    def test_every_kernel_test_over_buffers_is_run(self):
        source = (REPOSITORY / "kernels/tests/cuda/main.rs").read_text()
        modules = {line.removeprefix("mod ").removesuffix(";") for line in source.splitlines() if line.startswith("mod ")}
        others = {"conversions", "device", "e4m3", "faults", "mutants", "sources", "tensor_cores", "timing"}
        self.assertEqual(modules - others, set(kernels.FAMILIES))

    def test_a_checker_has_to_reach_its_end(self):
        self.assertTrue(is_clean(["ERROR SUMMARY: 0 errors"]))
        self.assertTrue(is_clean(["RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "ERROR SUMMARY: 0 errors"]))
        for summary in [[], ["ERROR SUMMARY: 1 error"], ["ERROR SUMMARY: 10 errors"], ["RACECHECK SUMMARY: 3 hazards displayed"]]:
            self.assertFalse(is_clean(summary), summary)

    @unittest.skipUnless(numpy, "numpy is not installed")
    def test_logits_have_to_be_there_finite_close_and_surely_chosen(self):
        truth = numpy.array([[0.0, 10.0, 1.0], [5.0, 4.9, 0.0]], dtype="f4")
        compare = lambda ours: Comparison(numpy, truth).compare(numpy.array(ours, dtype="f4"), 0.02)[0]
        self.assertTrue(compare([[0.1, 10.1, 1.0], [4.9, 5.0, 0.0]]))
        for wrong in [[[0.0, 10.0, 1.0]], [[0.0, 10.0, 1.0], [5.0, float("nan"), 0.0]], [[0.0, 9.0, 1.0], [5.0, 4.9, 0.0]],
                      [[10.0, 0.0, 1.0], [5.0, 4.9, 0.0]]]:
            self.assertFalse(compare(wrong), wrong)
        flat = numpy.ones((2, 3), dtype="f4")
        self.assertFalse(Comparison(numpy, flat).compare(flat, 0.02)[0], "no row is sure")

    def test_the_table_sums_the_chunks_of_a_prompt(self):
        result = [{"case": [case["sequences"], case["context"], case["tokens"]], "device_ms": 2.0} for case in cases_of_table()]
        figures = milliseconds(result)
        self.assertEqual(figures["prompts"], {"1k": 2.0, "8k": 2.0, "32k": 8.0, "512 after 16k": 2.0})
        self.assertEqual(ratios(figures, {"decode": {"8": 3.0}, "prompts": {}}), "8 1.50")


def batch_parity_of_nothing(suite):
    suite.hollow = lambda: True
    batch_parity(suite, ["tiny-llama"])


class Profiles(unittest.TestCase):
    def test_kernels_of_a_report_are_summed_by_step(self):
        head = ",".join(f'"{column}"' for column in ["ID", "Kernel Name", DURATION, READ, WRITTEN])
        rows = ['"","","ns","byte","byte"', '"0","embedding_bf16","2,000","1,000","0"', '"1","norm_bf16","1000","10","5"',
                '"2","norm_bf16","3000","10","5"', '"3","embedding_bf16","2000","1","0"']
        first, second = steps_of("\n".join(["==PROF== connected", head, *rows]))
        self.assertEqual(first["norm_bf16"], {"launches": 2, "us": 4.0, "bytes": 30.0})
        self.assertEqual(first["embedding_bf16"]["bytes"], 1000.0)
        self.assertEqual(second, {"embedding_bf16": {"launches": 1, "us": 2.0, "bytes": 1.0}})


class Records(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)
        self.recorder = Recorder(Path(self.scratch.name), Path(self.scratch.name) / "out", 1, "first")
        self.addCleanup(self.recorder.end_phase)
        self.addCleanup(self.recorder.scratch.cleanup)

    def test_a_run_writes_three_files(self):
        self.recorder.check("kernels", "rows", False, "bad")
        self.recorder.command("hello", ["echo", "hello"], 10)
        self.assertEqual(sorted(os.listdir(self.recorder.out)), ["first.json", "first.log", "first.txt"])
        self.assertFalse(json.loads((self.recorder.out / "first.json").read_text())["passed"])

    def test_a_phase_ends_programs_and_whatever_else_hangs(self):
        self.recorder.limit_phase(time.monotonic() + 4)
        with self.assertRaises(Skipped):
            self.recorder.command("sleep", ["sleep", "30"], 20)
        self.recorder.limit_phase(time.monotonic() - 1)
        with self.assertRaises(Skipped):
            time.sleep(20)
        self.recorder.end_phase()
        self.assertGreater(self.recorder.left(), 30)

    def test_a_job_may_be_longer_than_an_argument(self):
        job = {"logits": {"sequences": [[151_000] * 600] * 64}}
        command = self.recorder.measure_command("model", job, slots=64)
        self.assertLess(max(map(len, command)), 1 << 12)
        self.assertEqual(json.loads(Path(command[1]).read_text()), {"model": "model", "task": job, "slots": 64})

    def test_a_run_without_one_of_its_checks_has_not_passed(self):
        self.recorder.check("kernels", "rows", True)
        self.recorder.skip("parity", "no time left")
        written = json.loads((self.recorder.out / "first.json").read_text())
        self.assertEqual((written["passed"], written["undone"]), (False, ["parity"]))
        self.assertIn("INCOMPLETE, without parity", (self.recorder.out / "first.txt").read_text())

    def test_a_long_output_is_cut_in_the_log_alone(self):
        count = 2 * LOG_OUTPUT_MAX
        code, output, _ = self.recorder.command("long", [sys.executable, "-c", f"print('a' * {count})"], 20)
        self.assertEqual((code, len(output)), (0, count + 1))
        self.assertLess(self.recorder.log.stat().st_size, LOG_OUTPUT_MAX + 1000)

    def test_a_conversation_answers_says_why_not_and_ends(self):
        answers = "import sys, json\nprint('noise')\nfor line in sys.stdin: print(json.dumps({'got': json.loads(line)}), flush=True)"
        with Conversation(self.recorder, "echo", [sys.executable, "-c", answers]) as echo:
            self.assertEqual(echo.ask({"a": 1}, 20), {"got": {"a": 1}})
        with Conversation(self.recorder, "bad", [sys.executable, "-c", "print('{\"error\": \"no GPU\"}')"]) as bad:
            with self.assertRaisesRegex(RuntimeError, "no GPU"):
                bad.answer(20)
            with self.assertRaisesRegex(RuntimeError, "ended with exit status"):
                bad.ask({}, 20)
        with Conversation(self.recorder, "silent", ["sleep", "30"]) as silent:
            with self.assertRaisesRegex(RuntimeError, "said nothing"):
                silent.answer(0.2)

    def test_a_rehearsal_must_fail_for_want_of_a_gpu(self):
        rows = [("machine", "packages", "none", "", ""), ("machine", "measure starts", "passed", "", "ok"), ("steps", "a", "there is no NVIDIA driver", "", "FAILED"),
                ("steps", "b", "skipped", "", "open"), ("peer", "figure", "1 tok/s", "", "")]
        self.assertEqual(rehearsal_failures(rows), [])
        wrong = [("machine", "measure starts", "no libc", "", "FAILED"), ("steps", "c", "field x is missing", "", "FAILED"),
                 ("steps", "d", "passed", "", "ok"), ("steps", "e", "skipped: no time left", "", "open")]
        self.assertEqual(len(rehearsal_failures(rows + wrong)), len(wrong))


class Figures(unittest.TestCase):
    def test_filters_select_tests_and_never_timings(self):
        tests = ["attention::exact", "timing::rows::norm"]
        self.assertEqual(kernels.unmatched(["attention::", "rows::", "timing::rows::", "timing::sampling::"], tests),
                         ["rows::", "timing::sampling::"])

    def test_microbenchmarks_are_read_and_summed_up(self):
        common = {"kernel": "attention_decode", "model": "m", "fp8": False, "pool_gb": 20, "sequences": 64, "context": 1023, "us": 9.0}
        lines = ["running 1 test", 'test timing::attention::decode ... {"copy_gb_s": 4000, "spread": 0.01}',
                 *(json.dumps({**common, "blocks": order, "share_of_reading": share}) for order, share in
                   [("consecutive", 0.9), ("shuffled", 0.7)]), "{not json", '{"kernel": "norm", "skipped": "it does not fit"}']
        rows = list(kernels.rows_of("\n".join(lines)))
        self.assertEqual(len(rows), 4)
        (what, figure, goal, good), = kernels.summary(row for row in rows if "us" in row)
        self.assertEqual((what, goal, good), ("m decode of 64 x 1,024, pool of 20 GB", "80 %", False))
        self.assertIn("shuffled 9.0 us, 70 % of reading", figure)

    def test_decoding_beside_another_server_is_told_from_its_prompts(self):
        class Rows:
            def __init__(self):
                self.rows = []

            def row(self, *row):
                self.rows.append(row)

        suite, took = Rows(), lambda seconds: {"seconds": seconds, "all": [seconds], "output_tokens": 8 * beside.OUTPUT}
        steps = beside.OUTPUT - beside.SHORT
        medians = {"short decode 8": {"ours": took(1.0), "vllm": took(1.0)},
                   "decode 8": {"ours": took(1.0 + steps * 0.01), "vllm": took(1.0 + steps * 0.02)}}
        show(suite, "m", "short decode 8", medians)
        show(suite, "m", "decode 8", medians)
        (phase, what, figure, goal, good), = suite.rows
        self.assertEqual((phase, what, goal, good), ("beside", "m, decode 8", "1 x", True))
        self.assertIn("ours 10.00 ms a step, 800 tok/s | vllm 20.00 ms", figure)

    def test_cases_that_do_not_fit_are_marked(self):
        fits = {label: fits for label, _, _, _, fits in cases(100_000)}
        self.assertTrue(fits["decode 64"] and fits["prefill 32768"])
        self.assertFalse(fits["decode 256"])
        self.assertTrue(all(fits for *_, fits in cases(None)))


class Checkpoints(unittest.TestCase):
    def test_parameters_are_those_that_sizes_are_computed_from(self):
        import math
        for name in shapes.SHAPES:
            matrices = sum(2 * math.prod(shape) for shape in shapes.parameters(name).values() if len(shape) > 1)
            self.assertEqual(matrices, shapes.file_bytes(name), name)

    def test_a_hollow_checkpoint_takes_no_room(self):
        with tempfile.TemporaryDirectory() as scratch:
            path = shapes.make_hollow("tiny-llama", Path(scratch))
            status = (path / "model.safetensors").stat()
            self.assertGreater(status.st_size, shapes.file_bytes("tiny-llama"))
            self.assertLess(status.st_blocks * 512, 1 << 20)

    def test_the_digest_of_sources_is_that_of_the_embedded_kernels(self):
        digest = images.sources_digest(REPOSITORY / "kernels" / "cuda")
        self.assertRegex(digest, "^[0-9a-f]{64}$")
        self.assertIsNone(images.sources_digest(REPOSITORY / "nowhere"))

    def test_replaced_images_are_named_with_their_digests(self):
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "norm.cubin").write_bytes(b"abc")
            (Path(scratch) / "norm.log").write_bytes(b"")
            os.environ["INFLIGHT_CUDA_IMAGES"] = scratch
            self.addCleanup(os.environ.pop, "INFLIGHT_CUDA_IMAGES")
            self.assertEqual(images.replaced(), {"norm.cubin": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"})
            os.environ["INFLIGHT_CUDA_IMAGES"] = f"{scratch}/nowhere"
            self.assertIsNone(images.replaced())


if __name__ == "__main__":
    unittest.main()
