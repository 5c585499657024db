//! What all serving threads of a gateway share: limits, keys, accounts, and the settings they came from.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use actix_web::http::StatusCode;
use arc_swap::ArcSwap;

use super::access::Access;
use super::backend::Backend;
use super::errors::ApiError;
use super::meter::Tally;
use crate::settings::{Http, Settings, SettingsError};

/// Reads the settings anew, for a reload.
pub type Source = Box<dyn Fn() -> Result<Settings, SettingsError> + Send + Sync>;

/// See the module.
pub(super) struct Front {
    http: ArcSwap<Http>,
    pub access: Access,
    pub tally: Arc<Tally>,
    current: Mutex<Settings>,
    source: OnceLock<Source>,
}

impl Front {
    pub fn new(settings: &Settings) -> Self {
        Self {
            http: ArcSwap::from_pointee(settings.http.clone()),
            access: Access::new(&settings.http),
            tally: Arc::default(),
            current: Mutex::new(settings.clone()),
            source: OnceLock::new(),
        }
    }

    /// The settings of the moment.
    pub fn http(&self) -> Arc<Http> {
        self.http.load_full()
    }

    /// All settings of the moment.
    pub fn settings(&self) -> Settings {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where a reload reads from. The first one stays.
    pub fn read_from(&self, source: Source) {
        let _ = self.source.set(source);
    }

    /// Reads the settings anew and takes over what changed: all of it, or nothing. Returns the keys that did.
    pub fn reload<B: Backend>(&self, backend: &B) -> Result<Vec<String>, ApiError> {
        let Some(source) = self.source.get() else {
            let message = "This gateway does not know where its settings came from.";
            return Err(ApiError::new(StatusCode::CONFLICT, "no_settings_source", message));
        };
        let bad = |error: SettingsError| {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_settings", error.to_string())
        };
        let new = source().map_err(bad)?;
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = current.changed(&new);
        if let Some(fixed) = changed.iter().find(|key| !Settings::may_change(key)) {
            let message =
                format!("`{fixed}` cannot change while the gateway runs; restart it. Nothing was changed.");
            return Err(ApiError::new(StatusCode::CONFLICT, "needs_restart", message));
        }
        new.require_access().map_err(bad)?;
        // The keys' file may have changed although its path did not.
        self.access.adopt(&new.http).map_err(bad)?;
        backend.adopt(&current, &new);
        self.http.store(Arc::new(new.http.clone()));
        *current = new;
        tracing::info!(?changed, "settings reloaded");
        Ok(changed)
    }
}
