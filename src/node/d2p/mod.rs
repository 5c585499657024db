//! D→P: a D pushes KV back to a P, which keeps it in host memory and can send it to any D again.
//!
//! - [`sender`]: what a D has to push, bounded, and [`push`] the task that pushes it, below everything else.
//! - [`receive`]: the P's own listener; [`tier`] the memory behind it.
//! - [`restore`]: the way back.
//! - [`mod@bench`]: how fast it is against a plain TCP stream.

use tokio_util::sync::CancellationToken;

pub mod bench;
pub mod push;
pub mod receive;
pub mod restore;
pub mod sender;
pub mod tier;

/// Runs a job on a thread of its own until `stop`: pushes are checksums and copies, and serving should not wait for
/// them.
pub fn apart<F>(name: &str, stop: CancellationToken, job: impl FnOnce() -> F + Send + 'static)
where
    F: Future<Output = ()>,
{
    let run = move || match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(async {
            tokio::select! {
                () = stop.cancelled() => {}
                () = job() => {}
            }
        }),
        Err(error) => tracing::error!(%error, "no D→P sync"),
    };
    if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(run) {
        tracing::error!(%error, "no D→P sync");
    }
}
