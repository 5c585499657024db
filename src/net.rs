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
