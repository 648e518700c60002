"""Command: score weights on a data set and write a report. See `pipeline/evaluate/score_report.py`.

Score weights on a split of a data set: top-1, top-5 (of more than five classes) and loss; precision, recall and F1 of
each class; a confusion matrix; mAP of several labels; few-shot linear and kNN accuracy of the features.
Scores have 95 % intervals over the images. Runs in one process, on a GPU or a CPU.

  python launch/evaluate.py weights=runs/vit_b16 data=datasets/imagenet
  python launch/evaluate.py weights=ViT-B_16.npz data=datasets/pets split=test classify=false shots=10

Writes report.md, scores.json, per_class.csv (per_label.csv) and confusion.png into the folder that it prints at the
end. Unreadable images count as wrong and are listed; more than max_bad_share of them are an error.
"""

from _repository import command

from pipeline.settings.commands.weights import ScoreConfig

if __name__ == "__main__":
    command.main(ScoreConfig, "pipeline.evaluate.score_report", __doc__)
