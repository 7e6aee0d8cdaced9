//! Serves models on loopback as the Hub does: `hub_stand_in org/name… org/other=DIRECTORY…`, each a tiny random model or the files of a
//! directory. Prints its endpoint, and serves until its standard input ends.

use std::io::Read;

use inflight_fixtures::{Arch, Checkpoint, Dtype};
use inflight_hub_stand_in::StandIn;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let hub = StandIn::start();
    for name in std::env::args().skip(1) {
        if let Some((name, directory)) = name.split_once('=') {
            hub.add_directory(name, directory.as_ref());
            continue;
        }
        let folder = Checkpoint::new(Arch::Qwen3, Dtype::Bf16).sharded(2).write_temp()?;
        hub.add_directory(&name, folder.path());
    }
    println!("{}", hub.endpoint());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
