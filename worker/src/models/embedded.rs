/// What the model inside the binary is called.
pub(super) const NAME: &str = "inflight-demo";

/// The files of the model inside the binary, by name. `worker/demo/train` makes them.
pub(super) static FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../../demo/config.json")),
    ("generation_config.json", include_bytes!("../../demo/generation_config.json")),
    ("model.safetensors", include_bytes!("../../demo/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../demo/tokenizer_config.json")),
];
