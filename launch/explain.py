"""Command: draw figures that explain weights and their predictions. See `pipeline/explain/explain.py`.

Draw figures that explain weights. For a ViT: attention, attention rollout, attention distance of each head,
similarity of position embeddings, the patches of an image and their features as colours, tokens and FLOPs; with MAE's
decoder its reconstructions. Also for a ResNet: Grad-CAM, filters of the first layer, and a sheet of predictions with the most confident mistakes first. See docs/explain.md.

  python launch/explain.py weights=runs/photos images=datasets/photos
  python launch/explain.py weights=runs/photos images=[cat.jpg,dog.jpg] draw=attention layer=12 head=all
  python launch/explain.py weights=ViT-L_32.npz draw=[filters,positions]
  python launch/explain.py weights=mae_visualize_vit_large.pth images=photos draw=reconstruction normalise=false
  python launch/explain.py weights=runs/photos images=datasets/photos mlflow=http://mlflow:5000

Writes a PNG per figure, cost.csv, and explain.json with the numbers in the figures.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process.start import guard

guard(__name__)

from pipeline.settings.command import main
from pipeline.settings.commands.weights import ExplainConfig


def explain(config: ExplainConfig) -> None:
    from pipeline.explain import explain  # Late: --help and mistakes in the settings need no torch.
    from pipeline.monitor.mlflow.weights import with_local_weights

    config = with_local_weights(config)
    numbers, files = explain.run(config)
    if config.mlflow:
        from pipeline.model.files import find_file
        from pipeline.monitor.origin import find_origin
        from pipeline.monitor.run_page import RunFacts
        from pipeline.monitor.tracking import send_report

        folder, tags = files[0].parent, {"weights": config.weights, "weights_run": str(numbers["run"])}
        origin = find_origin(find_file(Path(config.weights)))
        parents = {"parent": origin.run_id} if origin.run_id else {}
        facts = RunFacts(f"explain {config.weights}", "explain", tags=tags, parents=parents, origin=origin)
        send_report(config.mlflow, folder, facts, explain.metrics(numbers), files, config.experiment)


if __name__ == "__main__":
    main(ExplainConfig, explain, __doc__)
