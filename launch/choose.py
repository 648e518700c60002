"""Command: choose the images that are worth labelling first. See `pipeline/evaluate/choose.py`.

Choose NUM of many images so that each of the others resembles a chosen one, by the features of any weights: labels of
these teach more than labels of as many images at random, if they are few (docs/measurements.md). Runs
in one process, on a GPU or a CPU.

  python launch/choose.py weights=runs/lejepa_own_images data=datasets/unlabelled split=train num=100 out=to_label

The new folder has the images as files (images/001.jpg, ...), the most typical first, a sheet of the first ones, and
choice.csv: path, label (the known class, or empty), key of the image, and its group, if the images have groups. To go
on, fill in the column label and run

  python launch/shard.py source=to_label/choice.csv out=datasets/labelled

or move the files of images/ into folders of their classes and shard to_label/images. The same images, weights and
settings choose the same images on the same machine, and the first 50 of 100 are the choice of 50.

See docs/unlabelled.md.
"""

from _repository import command

from pipeline.settings.commands.weights import ChooseConfig

if __name__ == "__main__":
    command.main(ChooseConfig, "pipeline.evaluate.choose", __doc__)
