//! Generates the message and service types. protox parses the .proto files, so no `protoc` is needed.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

const FILES: [&str; 5] = [
    "inference/grpc_service.proto",
    "inflight/v1/admin.proto",
    "inflight/v1/inference.proto",
    "inflight/v1/sampling.proto",
    "inflight/v1/worker.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=inflight");
    println!("cargo::rerun-if-changed=inference");
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("inflight.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .codec_path("crate::StrictCodec")
        .btree_map(".")
        .compile_fds(descriptors)?;
    Ok(())
}
