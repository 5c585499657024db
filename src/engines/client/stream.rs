//! A connection to a worker: plain or TLS.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::SendError;
use crate::engines::tls;
use crate::net::{Network, Stream, Tcp};
use crate::settings::{Fleet, Secret};

/// How workers are reached, and what they are shown. Clones share the TLS set-up.
#[derive(Debug, Clone)]
pub struct Connector {
    timeout: Duration,
    key: Secret,
    ca_file: String,
    network: Arc<dyn Network>,
    tls: Arc<OnceLock<Result<Arc<ClientConfig>, String>>>,
}

impl Connector {
    /// A connector for a fleet.
    ///
    /// # Errors
    /// Names the setting that is wrong.
    pub fn new(fleet: &Fleet) -> Result<Self, String> {
        let connector = Self {
            timeout: Duration::from_millis(fleet.connect_timeout_ms),
            key: fleet.worker_key.clone(),
            ca_file: fleet.ca_file.clone(),
            network: Arc::new(Tcp),
            tls: Arc::default(),
        };
        if !fleet.ca_file.is_empty() {
            connector.tls()?;
        }
        Ok(connector)
    }

    /// Plain connections, and nothing shown.
    pub fn plain(timeout: Duration) -> Self {
        let (key, ca_file, network) = (Secret::default(), String::new(), Arc::new(Tcp));
        Self { timeout, key, ca_file, network, tls: Arc::default() }
    }

    /// The same over another network.
    pub fn through(self, network: Arc<dyn Network>) -> Self {
        Self { network, ..self }
    }

    /// Longest wait for a connection.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// What workers are shown.
    pub fn key(&self) -> Option<&str> {
        self.key.get()
    }

    /// Whom it believes; read on first use, as the system's authorities take a while.
    ///
    /// # Errors
    /// The authorities cannot be read.
    pub fn tls(&self) -> Result<Arc<ClientConfig>, String> {
        self.tls.get_or_init(|| tls::client(&self.ca_file)).clone()
    }

    /// Connects to `host[:port]`.
    pub(super) async fn connect(&self, secure: bool, authority: &str) -> Result<Stream, SendError> {
        let connect = async {
            let port = authority.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
            let plain = match (port, secure) {
                (Some(_), _) => self.network.connect(authority).await,
                (None, true) => self.network.connect(&format!("{authority}:443")).await,
                (None, false) => self.network.connect(&format!("{authority}:80")).await,
            };
            let plain = plain.map_err(|_| SendError::Connect)?;
            if !secure {
                return Ok(plain);
            }
            let host = match authority.rsplit_once(':') {
                Some((host, port)) if !port.ends_with(']') => host,
                _ => authority,
            };
            let name = ServerName::try_from(bare(host).to_owned()).map_err(|_| SendError::Connect)?;
            let config = self.tls().map_err(|error| {
                tracing::error!(error, "TLS to workers");
                SendError::Connect
            })?;
            let connector = tokio_rustls::TlsConnector::from(config);
            match connector.connect(name, plain).await {
                Ok(stream) => Ok(Box::new(stream) as Stream),
                Err(error) => {
                    tracing::warn!(%error, "TLS to a worker");
                    Err(SendError::Connect)
                }
            }
        };
        tokio::time::timeout(self.timeout, connect).await.map_err(|_| SendError::Connect)?
    }
}

/// An IPv6 address without its brackets.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}
