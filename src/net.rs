//! How bytes get to another machine. One seam under the gateway's client and the nodes' KV connections: TCP in
//! life, a simulated network in the fault lab.

use std::fmt::Debug;
use std::io;

use futures_core::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// A connection's bytes in both directions.
pub trait Io: AsyncRead + AsyncWrite + Debug + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Sync + Unpin> Io for T {}

/// A connection on which a hang-up is noticed while nobody reads.
pub trait Hangup {
    /// Resolves when the other side has closed, although what it said before may not be read yet.
    fn hung_up(&self) -> impl Future<Output = ()> + Send;
}

impl Hangup for TcpStream {
    #[cfg(target_os = "linux")]
    async fn hung_up(&self) {
        // Of what this interest waits for, urgent data, we send none; it waits for the end of reading besides.
        self.ready(tokio::io::Interest::PRIORITY).await.ok();
    }

    /// Elsewhere the system doesn't say, and a wait lasts as long as it may.
    #[cfg(not(target_os = "linux"))]
    async fn hung_up(&self) {
        std::future::pending().await
    }
}

/// An open connection. Dropping it closes it.
pub type Stream = Box<dyn Io>;

/// A way to open connections. Timeouts are the caller's.
pub trait Network: Debug + Send + Sync + 'static {
    /// Connects to `host:port`.
    fn connect<'a>(&'a self, authority: &'a str) -> BoxFuture<'a, io::Result<Stream>>;
}

/// The real one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp;

impl Network for Tcp {
    fn connect<'a>(&'a self, authority: &'a str) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(async move {
            let stream = TcpStream::connect(authority).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Stream)
        })
    }
}
