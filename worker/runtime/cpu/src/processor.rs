//! Name of the processor, for operators.

use std::fs::File;
use std::io::Read as _;

use inflight_kernels::cpu::Isa;

/// File in which Linux describes the processors; the first one comes first.
const DESCRIPTION: &str = "/proc/cpuinfo";
/// Bytes of it that are read.
const DESCRIPTION_BYTES_MAX: u64 = 4096;

/// Returns the name of the processor with the instruction set in use.
pub(super) fn name(isa: Isa) -> String {
    let mut text = Vec::new();
    let read =
        File::open(DESCRIPTION).and_then(|file| file.take(DESCRIPTION_BYTES_MAX).read_to_end(&mut text));
    let model = read.ok().and_then(|_| model_name(&String::from_utf8_lossy(&text)));
    format!("{} ({})", model.as_deref().unwrap_or("CPU"), isa.name())
}

/// Returns the model of the first processor of a description; processors of some architectures have none there.
fn model_name(description: &str) -> Option<String> {
    let fields = description.lines().filter_map(|line| line.split_once(':'));
    let (_, name) = fields.into_iter().find(|(field, _)| field.trim() == "model name")?;
    let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_that_of_the_first_processor_with_the_instruction_set() {
        let described = "processor\t: 0\nmodel\t\t: 106\nmodel name\t: Some  Make 8375C CPU @ 2.90GHz\n\nmodel name\t: other\n";
        assert_eq!(model_name(described).as_deref(), Some("Some Make 8375C CPU @ 2.90GHz"));
        assert_eq!(model_name("processor : 0\nCPU part : 0xd40\nmodel name :\n"), None);
        assert!(name(Isa::PORTABLE).ends_with(&format!("({})", Isa::PORTABLE.name())));
    }
}
