//! A connection to a worker: plain or TLS.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::SendError;
use crate::engines::tls;
use crate::settings::{Fleet, Secret};

/// How workers are reached, and what they are shown. Clones share the TLS set-up.
#[derive(Debug, Clone)]
pub struct Connector {
    timeout: Duration,
    key: Secret,
    ca_file: String,
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
            tls: Arc::default(),
        };
        if !fleet.ca_file.is_empty() {
            connector.tls()?;
        }
        Ok(connector)
    }

    /// Plain connections, and nothing shown.
    pub fn plain(timeout: Duration) -> Self {
        Self { timeout, key: Secret::default(), ca_file: String::new(), tls: Arc::default() }
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
            let plain = match (authority.rsplit_once(':'), secure) {
                (Some((_, port)), _) if !port.ends_with(']') => TcpStream::connect(authority).await,
                (_, true) => TcpStream::connect((bare(authority), 443)).await,
                (_, false) => TcpStream::connect((bare(authority), 80)).await,
            };
            let plain = plain.map_err(|_| SendError::Connect)?;
            plain.set_nodelay(true).map_err(|_| SendError::Connect)?;
            if !secure {
                return Ok(Stream::Plain(plain));
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
                Ok(stream) => Ok(Stream::Tls(Box::new(stream))),
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

/// See the module.
#[derive(Debug)]
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    /// Whether it is open and nothing came that nobody asked for.
    pub fn is_quiet(&mut self) -> bool {
        let mut byte = [0; 1];
        let mut cx = Context::from_waker(std::task::Waker::noop());
        Pin::new(self).poll_read(&mut cx, &mut ReadBuf::new(&mut byte)).is_pending()
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        matches!(self, Self::Plain(_))
    }
}
