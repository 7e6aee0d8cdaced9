//! On whose behalf requests are sent.

use std::str::FromStr;

/// Longest name of a tenant that a router takes, in bytes.
const NAME_BYTES_MAX: usize = 128;

/// A tenant of the workload: `NAME[,share=S][,weight=W][,priority=P]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Tenant {
    /// Its name; empty is the default tenant.
    pub name: String,
    /// How many of the requests it sends, relative to the others.
    pub share: f64,
    /// Its weight in the scheduler, if one is sent.
    pub weight: Option<f32>,
    /// Priority of its requests.
    pub priority: i32,
}

impl Tenant {
    /// A tenant that sends as much as each other one, of default weight and priority.
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
    fn tenants_are_read_and_what_the_router_would_refuse_is_refused_here() {
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
