"""The weights of other projects, in and out: what their files call each tensor, and how its axes lie.

entries.py       one tensor of a file and its place in our state; both directions follow from it
names.py         what each project calls the parts of a ViT
resnets.py       the same of a ResNet: BiT, and the one in front of a hybrid
official.py      .npz of google-research/vision_transformer, big_vision and big_transfer
state_dicts.py   state dicts of timm, Hugging Face and DINOv2
plain.py         which of our models their files can hold
preprocessing.py what their configuration files say of the images, and ours for theirs
"""
