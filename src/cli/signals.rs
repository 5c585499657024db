//! What the operating system tells a running command.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, which end it, and SIGHUP, which reads the settings anew.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Takes the signals over from the system: from here on they end nothing by themselves.
    ///
    /// # Errors
    /// The system does not hand them over.
    pub fn take() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits until the process is told to stop; `reload` is called for each SIGHUP meanwhile.
    pub async fn stop(&mut self, reload: impl Fn()) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => reload(),
            }
        }
    }
}
