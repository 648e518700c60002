"""Conversion between our state dicts and the weights files of other projects. Imports the files of pipeline.model
except `weights.py`. Used by model/, objectives/, evaluate/ and experiment/.

entries.py       a file's tensor and its place in our state dict; reading and writing both follow from a list of them
names.py         the projects' names for the parts of a ViT, and the configuration found in a file's tensors. A new
family
                 begins with a table here
resnets.py       the same for BiT and for the stem of a hybrid
official.py      .npz of google-research/vision_transformer, big_vision and big_transfer
state_dicts.py   finds out whose names a state dict has, and calls
timm_format.py   timm's and facebookresearch's: from and to timm
huggingface_format.py  transformers': from and to Hugging Face
reading.py       what these two share
mae.py           MAE with its decoder
plain.py         which of our models these files can hold
preprocessing.py the projects' settings of image preprocessing, and ours
"""
