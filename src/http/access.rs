//! Who may ask. A request shows its key; what is kept of keys are hashes, and a comparison takes as long for a wrong key
//! as for a right one. A key may bound what it has running and how often it asks.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use actix_web::http::header::{self, HeaderMap};
use arc_swap::ArcSwap;
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

use super::errors::ApiError;
use crate::actors::gate::{Gate, Permit};
use crate::settings::keys::ApiKey;
use crate::settings::{Auth, Http, SettingsError};

/// Longest key that is looked at, in bytes.
const KEY_MAX: usize = 512;

/// See the module.
pub(super) struct Access {
    rules: ArcSwap<Rules>,
}

struct Rules {
    open: bool,
    keys: Vec<Arc<Entry>>,
}

struct Entry {
    key: ApiKey,
    gate: Option<Arc<Gate>>,
    rate: Option<Rate>,
}

/// One request of somebody who may ask; counts until it is dropped.
#[derive(Debug, Default)]
pub(super) struct Caller {
    /// Whether the request showed a key of this gateway: it is nothing for workers then.
    pub by_key: bool,
    _permit: Option<Permit>,
}

impl Access {
    /// Rules from settings. Keys that cannot be read open nothing; [`crate::Settings::require_access`] tells before.
    pub fn new(http: &Http) -> Self {
        let keys = http.load_keys().unwrap_or_default();
        Self { rules: ArcSwap::from_pointee(Rules::new(http, keys, &[])) }
    }

    /// Takes over changed keys; who runs under one that stays is still counted.
    pub fn adopt(&self, http: &Http) -> Result<(), SettingsError> {
        let keys = http.load_keys()?;
        self.rules.store(Arc::new(Rules::new(http, keys, &self.rules.load().keys)));
        Ok(())
    }

    /// Lets a request in.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        let rules = self.rules.load();
        match rules.find(headers) {
            Some(entry) => entry.enter(),
            None if rules.open => Ok(Caller::default()),
            None => Err(ApiError::no_key(shown(headers).is_some())),
        }
    }

    /// Lets a request to `/admin` or `/metrics` in. `local`: only this machine reaches the listener.
    pub fn admin(&self, headers: &HeaderMap, local: bool) -> Result<(), ApiError> {
        let rules = self.rules.load();
        let locked = rules.keys.iter().any(|entry| entry.key.admin);
        match rules.find(headers) {
            Some(entry) if entry.key.admin => Ok(()),
            _ if rules.open && local && !locked => Ok(()),
            None if locked || !rules.open => Err(ApiError::no_key(shown(headers).is_some())),
            _ => Err(ApiError::no_admin()),
        }
    }
}

impl Rules {
    fn new(http: &Http, keys: Vec<ApiKey>, old: &[Arc<Entry>]) -> Self {
        let open = match http.auth {
            Auth::Open => true,
            Auth::Auto => keys.is_empty(),
            Auth::Keys => false,
        };
        let entry = |key: ApiKey| match old.iter().find(|entry| entry.key == key) {
            Some(entry) => entry.clone(),
            None => Arc::new(Entry {
                gate: key.max_inflight.map(Gate::new),
                rate: key.per_minute.map(Rate::new),
                key,
            }),
        };
        Self { open, keys: keys.into_iter().map(entry).collect() }
    }

    /// The key a request shows. Every key is compared, whole.
    fn find(&self, headers: &HeaderMap) -> Option<&Arc<Entry>> {
        let shown = shown(headers)?;
        let hash = ApiKey::hash(shown);
        let mut found = u32::MAX;
        for (i, entry) in self.keys.iter().enumerate() {
            let same: Choice = entry.key.sha256.as_slice().ct_eq(hash.as_slice());
            found = u32::conditional_select(&found, &(i as u32), same);
        }
        self.keys.get(found as usize)
    }
}

impl Entry {
    fn enter(&self) -> Result<Caller, ApiError> {
        let permit = match &self.gate {
            Some(gate) => Some(gate.enter().ok_or_else(ApiError::key_busy)?),
            None => None,
        };
        if let Some(rate) = &self.rate {
            rate.take(Instant::now()).map_err(ApiError::key_rate)?;
        }
        Ok(Caller { by_key: true, _permit: permit })
    }
}

fn shown(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(|v| v.as_bytes()).and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
    });
    let key = bearer.or_else(|| headers.get("x-api-key").map(|v| v.as_bytes()))?;
    Some(key.trim_ascii()).filter(|key| key.len() <= KEY_MAX)
}

/// A bucket that fills evenly: a minute's worth may be asked at once.
struct Rate {
    per_minute: u32,
    state: Mutex<(f64, Option<Instant>)>,
}

impl Rate {
    fn new(per_minute: u32) -> Self {
        Self { per_minute, state: Mutex::new((f64::from(per_minute), None)) }
    }

    /// Takes one request out, or says in how many seconds there will be one.
    fn take(&self, now: Instant) -> Result<(), u32> {
        let full = f64::from(self.per_minute);
        let per_second = full / 60.0;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (left, since) = *state;
        let passed = since.map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
        let left = (left + passed * per_second).min(full);
        let taken = left >= 1.0;
        *state = (if taken { left - 1.0 } else { left }, Some(now));
        if taken { Ok(()) } else { Err(((1.0 - left) / per_second).ceil().max(1.0) as u32) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use actix_web::http::header::{HeaderName, HeaderValue};

    use super::*;
    use crate::settings::{Layers, Settings};

    fn access(keys: &[(&str, &str, &str)], auth: &str) -> Access {
        let lines = keys.iter().map(|(name, key, more)| {
            let mut line = ApiKey {
                name: (*name).into(),
                sha256: ApiKey::hash(key.as_bytes()),
                max_inflight: None,
                per_minute: None,
                admin: false,
            }
            .to_string();
            line += more;
            line
        });
        let flags = vec![
            ("http.keys".to_owned(), lines.collect::<Vec<_>>().join(",")),
            ("http.auth".to_owned(), auth.to_owned()),
        ];
        Access::new(&Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings.http)
    }

    fn headers(name: &str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(HeaderName::try_from(name).unwrap(), HeaderValue::try_from(value).unwrap());
        headers
    }

    #[test]
    fn keys_open_and_nothing_else_does() {
        let access = access(&[("a", "kvc-a", ""), ("b", "kvc-b", " admin")], "auto");
        for (name, value) in
            [("authorization", "Bearer kvc-a"), ("authorization", "bearer kvc-b"), ("x-api-key", "kvc-a")]
        {
            assert!(access.caller(&headers(name, value)).unwrap().by_key, "{value}");
        }
        for (name, value) in [
            ("authorization", "Bearer kvc-c"),
            ("authorization", "Basic kvc-a"),
            ("authorization", "kvc-a"),
            ("x-api-key", ""),
            ("x-other", "kvc-a"),
        ] {
            assert_eq!(access.caller(&headers(name, value)).unwrap_err().status, 401, "{value}");
        }
        let admin = |value| access.admin(&headers("x-api-key", value), true).map_err(|e| e.status.as_u16());
        assert_eq!([admin("kvc-b"), admin("kvc-a"), admin("x")], [Ok(()), Err(403), Err(401)]);
    }

    #[test]
    fn open_is_open_but_not_for_administration() {
        let nobody = HeaderMap::new();
        let open = access(&[], "open");
        assert!(!open.caller(&nobody).unwrap().by_key);
        assert!(open.admin(&nobody, true).is_ok());
        assert_eq!(open.admin(&nobody, false).unwrap_err().status, 403);
        let locked = access(&[("root", "kvc-r", " admin")], "open");
        assert!(locked.caller(&nobody).is_ok() && locked.admin(&nobody, true).is_err());
        assert!(locked.admin(&headers("x-api-key", "kvc-r"), false).is_ok());
        assert!(access(&[], "auto").caller(&nobody).is_ok());
        assert!(access(&[], "keys").caller(&nobody).is_err());
    }

    #[test]
    fn a_key_is_bounded() {
        let access = access(&[("a", "kvc-a", " inflight=1"), ("b", "kvc-b", " rpm=2")], "auto");
        let a = headers("x-api-key", "kvc-a");
        let first = access.caller(&a).unwrap();
        assert_eq!(access.caller(&a).unwrap_err().code, "key_busy");
        drop(first);
        assert!(access.caller(&a).is_ok());
        let b = headers("x-api-key", "kvc-b");
        assert!(access.caller(&b).is_ok() && access.caller(&b).is_ok());
        let over = access.caller(&b).unwrap_err();
        assert_eq!((over.status.as_u16(), over.code, over.retry_after), (429, "key_rate", Some(30)));
    }

    #[test]
    fn a_rate_fills_evenly() {
        let (rate, start) = (Rate::new(60), Instant::now());
        assert!((0..60).all(|_| rate.take(start).is_ok()));
        assert_eq!(rate.take(start), Err(1));
        assert_eq!(rate.take(start + Duration::from_millis(1001)), Ok(()));
        assert_eq!(rate.take(start + Duration::from_millis(1001)), Err(1));
        let later = start + Duration::from_secs(3600);
        assert_eq!((0..99).filter(|_| rate.take(later).is_ok()).count(), 60);
    }
}
