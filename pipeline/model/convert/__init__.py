"""Conversion between our state dicts and the weights files of other projects. Imports the files of pipeline.model
except `weights.py`. Used by model/, objectives/, evaluate/ and experiment/.

layouts.py       names and axes of a file's tensors, from tables.toml; reading and writing both follow from them. A new
                 family begins with a table there
reading.py       shared by readers: the configuration found in a file's tensors, and the ViT with it
official.py      .npz of google-research/vision_transformer, big_vision and big_transfer
state_dicts.py   finds out whose names a state dict has, and calls
timm_format.py   timm's and facebookresearch's: from and to timm
huggingface_format.py  transformers': from and to Hugging Face
mae.py           MAE with its decoder
preprocessing.py the projects' settings of image preprocessing, and ours
"""
