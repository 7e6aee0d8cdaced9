//! Kernel images from files in place of embedded ones, so that rebuilt kernels can be tried where there is a CUDA
//! compiler but no Rust.

use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::DeviceError;
use super::image::{FAMILIES, Image, Images, Target};

/// Environment variable with a folder of images: `FAMILY.cubin`, machine code, or `FAMILY.ptx`. Each replaces the
/// embedded image of its family.
pub const IMAGES_VARIABLE: &str = "INFLIGHT_CUDA_IMAGES";

/// Maximum bytes of an image; the largest embedded one has half a megabyte.
const BYTES_MAX: u64 = 64 << 20;
/// Machine number of NVIDIA GPUs in ELF files.
const ELF_MACHINE_CUDA: u64 = 190;
/// Type of ELF sections without bytes in the file.
const ELF_NO_BITS: u64 = 8;

/// Image from a file, in place of the embedded image of its family.
pub struct Replacement {
    /// Name of the family.
    pub family: &'static str,
    /// File that holds the image.
    pub file: PathBuf,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    bytes: Vec<u8>,
}

impl Replacement {
    /// Returns the images in the folder that [`IMAGES_VARIABLE`] names; none if it is unset or empty.
    ///
    /// # Errors
    /// Those of [`Replacement::in_folder`].
    pub fn of_environment() -> Result<Vec<Self>, DeviceError> {
        match std::env::var_os(IMAGES_VARIABLE).filter(|folder| !folder.is_empty()) {
            Some(folder) => Self::in_folder(Path::new(&folder)),
            None => Ok(Vec::new()),
        }
    }

    /// Returns the images in `folder`, by family; files that are neither `.cubin` nor `.ptx` are ignored.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] with the path of what is at fault: an unreadable folder or file, an image of no
    /// family, two of one, or a file that is no whole image.
    pub fn in_folder(folder: &Path) -> Result<Vec<Self>, DeviceError> {
        let unreadable = |error: std::io::Error| failed(folder, error.to_string());
        let mut all: Vec<Self> = Vec::new();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(unreadable)? {
            files.push(entry.map_err(unreadable)?.path());
        }
        files.sort();
        for file in files {
            let is_machine_code = match file.extension().and_then(|extension| extension.to_str()) {
                Some("cubin") => true,
                Some("ptx") => false,
                _ => continue,
            };
            let stem = file.file_stem().and_then(|stem| stem.to_str());
            let family = FAMILIES.into_iter().find(|family| Some(*family) == stem).ok_or_else(|| {
                let families = FAMILIES.join(", ");
                failed(&file, format!("no kernel family has this name; there are {families}"))
            })?;
            if let Some(other) = all.iter().find(|other| other.family == family) {
                let other = other.file.display();
                return Err(failed(&file, format!("{other} is of the same family; remove one")));
            }
            let bytes = read(&file)?;
            let checked = if is_machine_code { check_machine_code(&bytes) } else { check_ptx(&bytes) };
            checked.map_err(|reason| failed(&file, reason))?;
            let sha256 = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            all.push(Self { family, file, sha256, bytes });
        }
        Ok(all)
    }
}

impl Images {
    /// Returns the images of all families for a target: those of [`IMAGES_VARIABLE`], and the embedded ones of
    /// families that it has none of.
    ///
    /// # Errors
    /// Those of [`Images::of`] and [`Replacement::of_environment`].
    pub fn of_environment(&self, target: Target) -> Result<Vec<Image>, DeviceError> {
        self.of_with(target, &Replacement::of_environment()?)
    }

    /// Returns the images of all families for a target, some of them replaced.
    ///
    /// # Errors
    /// Those of [`Images::of`].
    pub fn of_with(&self, target: Target, replacements: &[Replacement]) -> Result<Vec<Image>, DeviceError> {
        let mut images = self.of(target)?;
        for image in &mut images {
            if let Some(replacement) = replacements.iter().find(|other| other.family == image.family) {
                *image = Image::of_file(image.family, &replacement.bytes, replacement.file.clone());
            }
        }
        Ok(images)
    }
}

fn failed(path: &Path, reason: String) -> DeviceError {
    DeviceError::Failed { what: format!("reading {} ({IMAGES_VARIABLE})", path.display()), reason }
}

fn read(file: &Path) -> Result<Vec<u8>, DeviceError> {
    let unreadable = |error: std::io::Error| failed(file, error.to_string());
    let metadata = std::fs::metadata(file).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(failed(file, "it is not a file".to_owned()));
    }
    match metadata.len() {
        0 => Err(failed(file, "it is empty; compile it again".to_owned())),
        1..=BYTES_MAX => std::fs::read(file).map_err(unreadable),
        bytes => {
            Err(failed(file, format!("it has {bytes} bytes; no kernel image is larger than {BYTES_MAX}")))
        }
    }
}

/// Checks that the tables and sections of an ELF file are within it, since the driver reads as much as they say.
fn check_machine_code(bytes: &[u8]) -> Result<(), String> {
    const FOREIGN: &str = "it is no machine code of a GPU; compile it with `nvcc -cubin`, or name PTX .ptx";
    const TRUNCATED: &str = "it is truncated; compile it again";
    // A little-endian number of `width` bytes.
    let number = |at: u64, width: u64| -> Option<u64> {
        let field = bytes.get(usize::try_from(at).ok()?..usize::try_from(at.checked_add(width)?).ok()?)?;
        Some(field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    let within =
        |offset: u64, size: u64| offset.checked_add(size).is_some_and(|end| end <= bytes.len() as u64);
    // 64 bits, little-endian.
    if !bytes.starts_with(b"\x7fELF\x02\x01") || number(18, 2) != Some(ELF_MACHINE_CUDA) {
        return Err(FOREIGN.to_owned());
    }
    let whole = || -> Option<bool> {
        let (segments, segment_bytes, segment_count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        let (sections, section_bytes, section_count) = (number(40, 8)?, number(58, 2)?, number(60, 2)?);
        let mut whole = within(segments, segment_bytes * segment_count)
            && within(sections, section_bytes * section_count);
        for index in 0..section_count {
            let section = sections.checked_add(index * section_bytes)?;
            let has_bytes = number(section + 4, 4)? != ELF_NO_BITS;
            whole &= !has_bytes || within(number(section + 24, 8)?, number(section + 32, 8)?);
        }
        Some(whole && section_count > 0)
    };
    if whole() == Some(true) { Ok(()) } else { Err(TRUNCATED.to_owned()) }
}

fn check_ptx(bytes: &[u8]) -> Result<(), String> {
    const FOREIGN: &str = "it is no PTX; compile it with `nvcc -ptx`, or name machine code .cubin";
    let text = std::str::from_utf8(bytes).map_err(|_| FOREIGN.to_owned())?;
    // The driver reads up to the first zero byte.
    let text = text.trim_end_matches('\0');
    let has = |directive: &str| text.lines().any(|line| line.trim_start().starts_with(directive));
    if text.contains('\0') || !has(".version") || !has(".target") {
        return Err(FOREIGN.to_owned());
    }
    // A file that was cut off ends within a function.
    if text.matches('{').count() == text.matches('}').count() {
        Ok(())
    } else {
        Err("it is truncated; compile it again".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_images_pass_and_their_first_halves_do_not() {
        let images = Images::unpack().expect("the archive is whole");
        for target in Target::ALL {
            for family in FAMILIES {
                let bytes = images.find(family, target).expect("every family has an image");
                let check = if target == Target::Ptx90 { check_ptx } else { check_machine_code };
                assert_eq!(check(bytes), Ok(()), "{family} for {target:?}");
                let cut = check(&bytes[..bytes.len() / 2]);
                assert_eq!(
                    cut,
                    Err("it is truncated; compile it again".to_owned()),
                    "{family} for {target:?}"
                );
            }
        }
    }
}
