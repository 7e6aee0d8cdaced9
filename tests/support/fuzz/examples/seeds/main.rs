//! Writes the seeds of the fuzzing corpora, from fixtures and from recorded messages:
//! `cargo run -p inflight-fuzz --example seeds`. Inputs that a fuzzer found lie beside them and are left alone.

mod files;
mod messages;
mod recordings;
mod texts;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

/// Seeds of one target: name and content of each.
type Seeds = Vec<(String, Vec<u8>)>;
type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(count) => {
            println!("wrote {count} seeds");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<usize> {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let mut count = 0;
    for (target, seeds) in [
        ("config", files::config()?),
        ("configuration", texts::configuration()),
        ("gguf", files::gguf_files()?),
        ("grammar", texts::grammars()),
        ("http_json", texts::http_json()),
        ("kserve", messages::kserve()),
        ("output_parser", texts::outputs()),
        ("router_recording", recordings::router()),
        ("router_session", messages::sessions(true)?),
        ("safetensors", files::safetensors()?),
        ("template", files::templates()?),
        ("tenants", texts::tenants()),
        ("tokenizer", files::tokenizers()?),
        ("worker_recording", recordings::worker()?),
        ("worker_session", messages::sessions(false)?),
    ] {
        let folder = corpora.join(target);
        std::fs::create_dir_all(&folder)?;
        for (name, content) in seeds {
            std::fs::write(folder.join(format!("seed-{name}")), content)?;
            count += 1;
        }
    }
    Ok(count)
}

/// Returns texts as seeds, numbered.
fn numbered(texts: &[&str]) -> Seeds {
    texts.iter().enumerate().map(|(at, text)| (format!("{at:02}"), text.as_bytes().to_vec())).collect()
}
