"""accelerate's loop; one line is another.

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator
from torch.utils.data import DataLoader

from counting import BATCH, CLIP, Counting, make_model, make_optimizer, options_of, read
from shardkit.integrations.huggingface import ShardkitPlugin
from shardkit.types import StateDict


def main(arguments: Sequence[str] | None = None) -> StateDict:
    """Trains; returns the weights."""
    options = options_of(arguments)
    accelerator = ShardkitPlugin().attach(Accelerator(cpu=True))  # was: Accelerator(cpu=True)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    data = DataLoader(Counting(), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    step = 0
    if options.resume is not None:
        weights, state, step = read(options.resume)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for batch in accelerator.skip_first_batches(data, step):
        if step == options.steps:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    accelerator.print(f"step {step}: loss {loss.item():.4f} on rank 0")
    weights = accelerator.get_state_dict(model)
    accelerator.save_state(str(options.folder / "accelerate"))
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).config.save_pretrained(options.folder / "accelerate")
    accelerator.wait_for_everyone()
    return weights


if __name__ == "__main__":
    main()
