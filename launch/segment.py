"""Command: score the features of each place of an image by segmentation. See `pipeline/evaluate/segmentation/run.py`.

Train a linear layer on the patch tokens of frozen weights to tell the class of each pixel, and score it on held-out
images: mIoU with its interval. apply=... writes the masks of other images. It measures what a score of whole images
does not: whether features say where things are. Runs in one process, on a GPU or a CPU.

  python launch/segment.py weights=runs/photos source=photos masks=masks image_size=512
  python launch/segment.py weights=runs/photos data=datasets/streets masks=datasets/street_masks
  python launch/segment.py --config configs/segment/ade20k.yaml mlflow=http://mlflow:5000 \\
      weights=facebook/dinov3-vitb16-pretrain-lvd1689m

A mask is a PNG of the size of its image, with the number of a class in each pixel or a colour for each class, and has
the path of its image below its folder: photos/cat/1.jpg, masks/cat/1.png. See docs/segmentation.md.
"""

from _repository import command

from pipeline.settings.commands.segment import SegmentConfig

if __name__ == "__main__":
    command.main(SegmentConfig, "pipeline.evaluate.segmentation.run", __doc__)
