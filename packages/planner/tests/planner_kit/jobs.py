"""A job of an encoder and a decoder."""

from pipegrid.planner import Device, Job, Layers, ModuleCosts, Network, Training

ALL_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v", "v_half")


def small_job(
    *, encoder=3, decoder=4, batch=4, flops=1.0, activations=1e9, frozen=False, alone=False, schedules=ALL_SCHEDULES
):
    images = ModuleCosts(
        "images",
        (Layers("encoder", encoder, flops=flops * 1e12, activations=activations / 2, parameters=1e8),),
        1e6,
        tp=(1, 2),
        frozen=frozen,
    )
    language = ModuleCosts(
        "language",
        (
            Layers("embedding", flops=0, parameters=1e8),
            Layers("decoder", decoder, flops=2e12, attention_flops=1e11, activations=activations, parameters=2e8),
            Layers("loss", flops=1e12, parameters=1e8),
        ),
        2e6,
    )
    return Job(
        (language,) if alone else (images, language),
        batch,
        Device(1e14, 80e9, 1e9, 1e7),
        Network(300e9, 40e9, gpus_per_node=4, latency=1e-5),
        () if alone else (("images", "language"),),
        Training(schedules=schedules),
    )
