//! What may change while the gateway runs, and what its settings need before it listens.

use toml::{Table, Value};

use super::keys::ApiKey;
use super::{Auth, Http, Settings, SettingsError, is_loopback};

/// Keys a reload may change.
const MAY_CHANGE: [&str; 13] = [
    "fleet.prefill",
    "fleet.decode",
    "http.auth",
    "http.keys",
    "http.keys_file",
    "http.body_limit_mib",
    "http.max_inflight",
    "http.first_byte_timeout_s",
    "http.idle_timeout_s",
    "http.resume_streams",
    "http.drain_delay_s",
    "http.drain_s",
    "http.explain",
];

impl Settings {
    /// Whether a reload may change this key (`section.key`).
    pub fn may_change(key: &str) -> bool {
        MAY_CHANGE.contains(&key)
    }

    /// The keys in which two settings differ, in order.
    pub fn changed(&self, other: &Self) -> Vec<String> {
        let (mine, theirs) = (self.sections(), other.sections());
        let mut keys = Vec::new();
        for ((section, mine), (_, theirs)) in mine.iter().zip(&theirs) {
            let all: std::collections::BTreeSet<&String> = mine.keys().chain(theirs.keys()).collect();
            let differ = all.into_iter().filter(|key| mine.get(*key) != theirs.get(*key));
            keys.extend(differ.map(|key| format!("{section}.{key}")));
        }
        if self.preset != other.preset {
            keys.push("algorithm.preset".into());
        }
        // Hidden in the tables; shown there only when one of the two is empty.
        if self.fleet.worker_key != other.fleet.worker_key
            && !keys.iter().any(|key| key == "fleet.worker_key")
        {
            keys.push("fleet.worker_key".into());
        }
        keys
    }

    fn sections(&self) -> Vec<(&'static str, Table)> {
        fn table(section: &impl serde::Serialize) -> Table {
            match Value::try_from(section) {
                Ok(Value::Table(table)) => table,
                _ => Table::new(), // a struct is always a table
            }
        }
        vec![
            ("algorithm", table(&self.options)),
            ("demo", table(&self.demo)),
            ("fleet", table(&self.fleet)),
            ("http", table(&self.http)),
            ("node", table(&self.node)),
            ("sessions", table(&self.sessions)),
        ]
    }

    /// Checks that nobody is let in by oversight: what a gateway needs before it listens.
    ///
    /// # Errors
    /// It would listen beyond this machine without keys and was not told to, or a key is missing or malformed.
    pub fn require_access(&self) -> Result<(), SettingsError> {
        let http = &self.http;
        let keys = http.load_keys()?;
        let wrong = |key: &str, value: &str, origin: String, allowed: &str| {
            Err(SettingsError::Value {
                key: key.into(),
                value: value.into(),
                origin,
                allowed: allowed.into(),
            })
        };
        match http.auth {
            Auth::Keys if keys.is_empty() => {
                return wrong(
                    "http.auth",
                    "\"keys\"",
                    "no API keys".into(),
                    "\"keys\" needs http.keys or http.keys_file",
                );
            }
            Auth::Auto if keys.is_empty() && !is_loopback(&http.listen) => {
                let origin =
                    format!("{} is reached from other machines and there are no API keys", http.listen);
                let allowed = "set http.keys or http.keys_file, or \"open\" to let everybody in";
                return wrong("http.auth", "\"auto\"", origin, allowed);
            }
            _ => {}
        }
        let admin = &http.admin_listen;
        let locked = http.auth == Auth::Open || keys.iter().any(|key| key.admin);
        if !admin.is_empty() && !is_loopback(admin) && !locked {
            let origin = "it is reached from other machines and no API key has `admin`".into();
            let allowed = "a loopback address, or a key with `admin`";
            return wrong("http.admin_listen", &format!("{admin:?}"), origin, allowed);
        }
        Ok(())
    }
}

impl Http {
    /// The keys of the settings and of their file.
    ///
    /// # Errors
    /// The file cannot be read, or a line of it is no key.
    pub fn load_keys(&self) -> Result<Vec<ApiKey>, SettingsError> {
        let invalid = |problem: String| SettingsError::Value {
            key: "http.keys".into(),
            value: "...".into(),
            origin: "settings".into(),
            allowed: problem,
        };
        let mut keys: Vec<ApiKey> =
            self.keys.iter().map(|line| line.parse()).collect::<Result<_, _>>().map_err(invalid)?;
        if !self.keys_file.is_empty() {
            let bad = |problem: String| SettingsError::File { path: self.keys_file.clone(), problem };
            let text = std::fs::read_to_string(&self.keys_file).map_err(|e| bad(e.to_string()))?;
            keys.extend(ApiKey::parse_file(&text).map_err(bad)?);
        }
        Ok(keys)
    }
}
