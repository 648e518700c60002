"""Command: draw figures that explain weights and their predictions. See `pipeline/explain/explain.py`.

Draw figures that explain weights. For a ViT: attention, attention rollout, attention distance of each head,
similarity of position embeddings, the patches' features as colours; with MAE's decoder its reconstructions. Also for a
ResNet: filters of the first layer, and a sheet of predictions with the most confident mistakes first. See
docs/explain.md.

  python launch/explain.py weights=runs/photos data=datasets/photos
  python launch/explain.py weights=runs/photos source=[cat.jpg,dog.jpg] draw=attention layer=12 head=all
  python launch/explain.py weights=ViT-L_32.npz draw=[filters,positions]
  python launch/explain.py weights=mae_visualize_vit_large.pth source=photos draw=reconstruction normalise=false
  python launch/explain.py weights=runs/photos data=datasets/photos mlflow=http://mlflow:5000

Writes a PNG per figure, and explain.json with the numbers in the figures.
"""

from _repository import command

from pipeline.settings.commands.weights import ExplainConfig

if __name__ == "__main__":
    command.main(ExplainConfig, "pipeline.explain.explain", __doc__)
