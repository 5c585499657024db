//! Answers that always come: a reply dropped unanswered (its actor died with the message in its mailbox)
//! answers `None`. So nobody waits for an actor that is gone.

/// The right to answer one question, once.
pub struct Reply<T>(Option<Box<dyn FnOnce(Option<T>) + Send>>);

impl<T> Reply<T> {
    /// `then` is called exactly once, by [`Reply::send`] or on drop.
    pub fn new(then: impl FnOnce(Option<T>) + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    /// Answers.
    pub fn send(mut self, answer: T) {
        if let Some(then) = self.0.take() {
            then(Some(answer));
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(None);
        }
    }
}

impl<T: Send + 'static> Reply<T> {
    /// A reply and the future that waits for it. `None`: the actor is gone.
    pub fn channel() -> (Self, impl Future<Output = Option<T>> + Send) {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let reply = Self::new(move |answer| {
            let _ = sender.send(answer);
        });
        (reply, async move { receiver.await.ok().flatten() })
    }
}

impl<T> std::fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reply")
    }
}
