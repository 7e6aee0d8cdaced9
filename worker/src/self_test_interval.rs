//! Interval of self-tests by device.

use std::time::Duration;

use crate::options::OptionsError;

/// Interval of self-tests: a prompt whose answer was recorded at the start, another answer to which ends the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SelfTestInterval {
    /// Five minutes on CPUs, off on GPUs, where self-tests have not been proven yet.
    #[default]
    Auto,
    /// No self-tests.
    Off,
    /// This interval; on GPUs only with batch-invariant kernels.
    Every(Duration),
}

/// Device as far as self-tests are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SelfTestDevice {
    /// A CPU, whose kernels are batch-invariant.
    Cpu,
    /// A GPU, with batch-invariant kernels or not.
    Gpu {
        /// Whether the same request has the same bits in any batch.
        deterministic: bool,
    },
    /// A simulated device, whose tokens are meaningless.
    Simulated,
}

impl SelfTestInterval {
    /// Default on CPUs.
    const AUTO: Duration = Duration::from_secs(300);
    /// Minimum: self-tests take the device's time.
    const MIN: Duration = Duration::from_secs(1);

    /// Returns the interval on a device; `None` if there are no self-tests.
    ///
    /// # Errors
    /// The interval is too short, or the device's bits depend on other requests.
    pub(crate) fn on(self, device: SelfTestDevice) -> Result<Option<Duration>, OptionsError> {
        let refused = |range| {
            let value = match self {
                Self::Every(interval) => format!("{interval:?}"),
                Self::Auto | Self::Off => format!("{self:?}"),
            };
            Err(OptionsError::OutOfRange { name: "--self-test-interval", value, range })
        };
        match (self, device) {
            (Self::Off, _) | (_, SelfTestDevice::Simulated) => Ok(None),
            (Self::Every(interval), _) if interval < Self::MIN => refused("at least 1s, or off"),
            (Self::Auto, SelfTestDevice::Cpu) => Ok(Some(Self::AUTO)),
            (Self::Auto, SelfTestDevice::Gpu { .. }) => Ok(None),
            (Self::Every(_), SelfTestDevice::Gpu { deterministic: false }) => refused(
                "off on GPUs without --deterministic, where the bits of an answer depend on other requests",
            ),
            (Self::Every(interval), SelfTestDevice::Cpu | SelfTestDevice::Gpu { deterministic: true }) => {
                Ok(Some(interval))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_the_self_tests_that_it_can_pass() {
        let every = SelfTestInterval::Every(Duration::from_secs(7));
        let on = |interval: SelfTestInterval| {
            let gpu = |deterministic| SelfTestDevice::Gpu { deterministic };
            let devices = [SelfTestDevice::Cpu, gpu(true), gpu(false), SelfTestDevice::Simulated];
            devices.map(|device| interval.on(device).map(|every| every.map(|every| every.as_secs())))
        };
        assert_eq!(on(SelfTestInterval::Auto), [Ok(Some(300)), Ok(None), Ok(None), Ok(None)]);
        assert_eq!(on(SelfTestInterval::Off), [Ok(None), Ok(None), Ok(None), Ok(None)]);
        let [cpu, deterministic, fast, simulated] = on(every);
        assert_eq!((cpu, deterministic, simulated), (Ok(Some(7)), Ok(Some(7)), Ok(None)));
        assert!(fast.unwrap_err().to_string().contains("--deterministic"));
        let short = SelfTestInterval::Every(Duration::from_millis(999)).on(SelfTestDevice::Cpu).unwrap_err();
        assert_eq!(short.to_string(), "--self-test-interval is 999ms; it must be at least 1s, or off");
    }
}
