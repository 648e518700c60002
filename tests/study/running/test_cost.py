"""What the plan of a study says of its cells."""

from pathlib import Path

from tiny import make_dataset
from tiny_study import write_run

from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig
from pipeline.study.running import driver
from pipeline.study.running.cells import open_study
from pipeline.study.running.cost import estimate, plan_table


def test_epochs_of_a_mixture_are_those_of_its_first_set(dataset: Path, tmp_path: Path) -> None:
    """All images of the mixture were counted as those of data.path, of which a batch holds a fifth."""
    base = write_run(tmp_path, dataset)
    other = make_dataset(tmp_path / "other", {"train": 60}, seed=1)
    for mix, shown in (
        ("", ["1.3", "2.1", "16.0"]),  # 8, 13 and 100 x 24 images of 150.
        (f"{{path: {other}, weight: 4}}", ["0.3", "2.0", "3.2"]),
        (f"{{path: {other}, weight: 1}}", ["0.6", "2.0", "8.0"]),
    ):
        lengths = "lengths=[8 steps,2 epochs,100 steps]"
        given = [f"run={base}", f"out={tmp_path}", "name=a", "models=[{name: tiny}]", "question=scaling", "tflops=1"]
        study = open_study(schema.load(StudyConfig, None, [*given, lengths, f"settings={[f'data.mix=[{mix}]']}"]))
        head, *rows = plan_table(study, estimate(study, []), driver.read_cells(study, {}).cells, 1)[:4]
        column = head.replace("M par.", "par.").split().index("epochs")
        assert [row.split()[column] for row in rows] == shown
