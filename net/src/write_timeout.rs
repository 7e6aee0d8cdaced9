//! Connection that fails when its peer reads nothing for too long.

use std::future::Future as _;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Connection whose writes fail once none has made progress for the timeout.
pub(crate) struct WriteTimeout<C> {
    connection: C,
    timeout: Duration,
    /// Timer of the write that is blocked.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl<C> WriteTimeout<C> {
    pub(crate) fn new(connection: C, timeout: Duration) -> Self {
        Self { connection, timeout, blocked: None }
    }

    /// Starts the timer of a blocked write, or ends it after progress.
    fn check<T>(&mut self, context: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.blocked = None;
            return write;
        }
        let deadline = Instant::now().checked_add(self.timeout);
        let Some(deadline) = deadline else { return Poll::Pending };
        let blocked = self.blocked.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        blocked.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for WriteTimeout<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(context, buffer)
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.connection).poll_write(context, buffer);
        self.check(context, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.connection).poll_write_vectored(context, buffers);
        self.check(context, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flush = Pin::new(&mut self.connection).poll_flush(context);
        self.check(context, flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shutdown = Pin::new(&mut self.connection).poll_shutdown(context);
        self.check(context, shutdown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_keeps_its_connection_and_one_that_does_not_loses_it() {
        let (near, mut far) = tokio::io::duplex(8);
        let mut near = WriteTimeout::new(near, Duration::from_secs(10));
        near.write_all(&[1; 8]).await.unwrap();
        let slow = tokio::spawn(async move {
            for _ in 0..5 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                far.read_exact(&mut [0; 8]).await.unwrap();
            }
            far
        });
        for _ in 0..5 {
            near.write_all(&[1; 8]).await.unwrap();
        }
        let _far = slow.await.unwrap();
        let start = Instant::now();
        assert_eq!(near.write_all(&[1; 8]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), 10);
    }
}
