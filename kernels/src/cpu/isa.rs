/// The instruction set that the kernels use. A value exists only if this machine has it.
///
/// It decides the order of reductions, hence bits: it belongs into the numerics fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(pub(crate) Path);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Path {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// Which has VNNI, too.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

#[cfg(target_arch = "x86_64")]
impl Path {
    /// Whether there are dot products of bytes, see [`super::simd::run_avx512_vnni`].
    pub(crate) fn has_vnni(self) -> bool {
        matches!(self, Self::Avx512Vnni | Self::Avx512Bf16)
    }
}

impl Isa {
    /// What runs everywhere: plain Rust.
    pub const PORTABLE: Isa = Isa(Path::Portable);

    /// Every form that this machine can run, the slowest first.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut, reason = "other architectures have one form")]
        let mut found = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let vnni = avx512 && is_x86_feature_detected!("avx512vnni");
            let bf16 = vnni && is_x86_feature_detected!("avx512bf16");
            found.extend(avx2.then_some(Isa(Path::Avx2)));
            found.extend(avx512.then_some(Isa(Path::Avx512)));
            found.extend(vnni.then_some(Isa(Path::Avx512Vnni)));
            found.extend(bf16.then_some(Isa(Path::Avx512Bf16)));
        }
        found
    }

    /// The fastest form that this machine can run.
    pub fn detect() -> Isa {
        Self::available().last().copied().unwrap_or(Self::PORTABLE)
    }

    /// The form called `name`, if this machine can run it.
    pub fn by_name(name: &str) -> Option<Isa> {
        Self::available().into_iter().find(|isa| isa.name() == name)
    }

    /// `portable`, `avx2`, `avx512`, `avx512-vnni` or `avx512-bf16`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Path::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Bf16 => "avx512-bf16",
        }
    }
}
