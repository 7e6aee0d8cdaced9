//! Tenants of a workload, with their shares of its requests.

use std::str::FromStr;

/// Maximum length of a tenant's name in bytes, as accepted by routers.
const NAME_BYTES_MAX: usize = 128;

/// Tenant of a workload, written `NAME[,share=S][,weight=W][,priority=P]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Tenant {
    /// Name; empty for the default tenant.
    pub name: String,
    /// Share of the requests, relative to other tenants.
    pub share: f64,
    /// Fair-share weight; `None` sends none.
    pub weight: Option<f32>,
    /// Priority of the requests.
    pub priority: i32,
}

impl Tenant {
    /// Creates a tenant of share 1 with default weight and priority.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), share: 1.0, weight: None, priority: 0 }
    }
}

impl FromStr for Tenant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || "write it like chat,share=3,weight=2,priority=5; all but the name may be left out".to_owned();
        let mut fields = text.split(',');
        let name = fields.next().unwrap_or_default();
        if name.is_empty() || name.contains('=') {
            return Err(wrong());
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(format!("a tenant's name has at most {NAME_BYTES_MAX} bytes"));
        }
        let mut tenant = Self::named(name);
        for field in fields {
            match field.split_once('=').ok_or_else(wrong)? {
                ("share", value) => tenant.share = value.parse().map_err(|_| wrong())?,
                ("weight", value) => tenant.weight = Some(value.parse().map_err(|_| wrong())?),
                ("priority", value) => tenant.priority = value.parse().map_err(|_| wrong())?,
                _ => return Err(wrong()),
            }
        }
        if !(tenant.share > 0.0 && tenant.share.is_finite()) {
            return Err("a share is a number above 0".to_owned());
        }
        if tenant.weight.is_some_and(|weight| !(weight > 0.0 && weight <= 1000.0)) {
            return Err("a weight is above 0 and at most 1000".to_owned());
        }
        if !(-100..=100).contains(&tenant.priority) {
            return Err("a priority is from -100 to 100".to_owned());
        }
        Ok(tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_are_parsed_and_invalid_ones_rejected_as_by_the_router() {
        let tenant: Tenant = "chat,share=3,weight=2,priority=-5".parse().unwrap();
        assert_eq!(tenant, Tenant { name: "chat".into(), share: 3.0, weight: Some(2.0), priority: -5 });
        assert_eq!("b".parse::<Tenant>().unwrap(), Tenant::named("b"));
        for text in [
            "",
            "share=2",
            "a,share=0",
            "a,share=nan",
            "a,weight=1001",
            "a,priority=101",
            "a,colour=red",
            "a,b",
        ] {
            assert!(text.parse::<Tenant>().is_err(), "{text}");
        }
        assert!("t".repeat(129).parse::<Tenant>().is_err());
    }
}
