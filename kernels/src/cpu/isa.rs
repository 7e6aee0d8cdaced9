//! Detection and selection of instruction sets.

/// Whether the portable kernels round `a * b + c` once. It decides bits: fused ones have a name of their own, see
/// [`Isa::name`].
pub(crate) const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// Instruction set that kernels use. A value exists only if this machine supports it.
///
/// It determines the order of reductions, hence bits: it is part of the numerics fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(pub(crate) IsaKind);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum IsaKind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// Includes VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

#[cfg(target_arch = "x86_64")]
impl IsaKind {
    /// Returns whether int8 dot products are available, see [`super::simd::run_avx512_vnni`].
    pub(crate) fn has_vnni(self) -> bool {
        matches!(self, Self::Avx512Vnni | Self::Avx512Bf16)
    }
}

impl Isa {
    /// Plain Rust, available everywhere; on aarch64 compiled to NEON.
    pub const PORTABLE: Isa = Isa(IsaKind::Portable);

    /// Returns the instruction sets that this machine supports, slowest first.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut, reason = "other architectures have only the portable one")]
        let mut supported = vec![Self::PORTABLE];
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
            supported.extend(avx2.then_some(Isa(IsaKind::Avx2)));
            supported.extend(avx512.then_some(Isa(IsaKind::Avx512)));
            supported.extend(vnni.then_some(Isa(IsaKind::Avx512Vnni)));
            supported.extend(bf16.then_some(Isa(IsaKind::Avx512Bf16)));
        }
        supported
    }

    /// Returns the fastest instruction set that this machine supports.
    pub fn detect() -> Isa {
        Self::available().last().copied().unwrap_or(Self::PORTABLE)
    }

    /// Returns the instruction set called `name`, if this machine supports it.
    pub fn by_name(name: &str) -> Option<Isa> {
        Self::available().into_iter().find(|isa| isa.name() == name)
    }

    /// Returns `portable`, `portable-fma`, `avx2`, `avx512`, `avx512-vnni` or `avx512-bf16`.
    ///
    /// `portable-fma` is [`Isa::PORTABLE`] in a build for aarch64, or for x86-64 with the target feature `fma`: its
    /// multiply-adds are rounded once, which gives other bits than `portable`, hence another numerics fingerprint.
    pub fn name(self) -> &'static str {
        match self.0 {
            IsaKind::Portable if FUSED => "portable-fma",
            IsaKind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512Bf16 => "avx512-bf16",
        }
    }
}

#[cfg(test)]
impl Isa {
    /// Returns the instruction sets to test; those that this machine lacks are reported as skipped, once.
    pub(crate) fn tested() -> Vec<Isa> {
        static REPORTED: std::sync::Once = std::sync::Once::new();
        REPORTED.call_once(|| {
            for name in ["avx2", "avx512", "avx512-vnni", "avx512-bf16"] {
                if Self::by_name(name).is_none() {
                    inflight_fixtures::skipped("kernels", &format!("this machine has no {name}"));
                }
            }
        });
        Self::available()
    }
}
