//! The terminal of `inflight top`: raw mode and the alternate screen, restored however the command ends, and the loop that
//! takes keys, updates and signals.

use std::io::{self, Stdout};
use std::time::Duration;

use crossterm::cursor::{Hide, Show};
use crossterm::event::{DisableBracketedPaste, EnableBracketedPaste, Event, EventStream};
use crossterm::execute;
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use futures::StreamExt as _;
use inflight_proto::v1::GetRequestResponse;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};

use super::draw::draw;
use super::feed::{self, Client, FeedEvent};
use super::model::{Action, Model};
use crate::exit::{CommandError, Exit};

/// Least time between two reads of the followed request.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// Terminal in raw mode with the alternate screen. The drop restores it, and so does a panic before it is reported.
struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

/// Restores the terminal when it is dropped.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        restore();
    }
}

/// Leaves the alternate screen and raw mode; harmless if the terminal is in neither.
fn restore() {
    // Without a terminal there is nothing to restore.
    let _ = execute!(io::stdout(), DisableBracketedPaste, LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

impl Screen {
    fn open() -> io::Result<(Self, Restore)> {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // The message would be lost with the alternate screen.
            restore();
            report(panic);
        }));
        let guard = Restore;
        enable_raw_mode()?;
        execute!(io::stdout(), EnterAlternateScreen, EnableBracketedPaste, Hide)?;
        Ok((Self { terminal: Terminal::new(CrosstermBackend::new(io::stdout()))? }, guard))
    }

    fn draw(&mut self, model: &Model) -> io::Result<()> {
        self.terminal.draw(|frame| draw(frame, model)).map(drop)
    }
}

/// Reads of followed requests, one at a time.
struct Reader {
    client: Option<Client>,
    results: mpsc::Sender<(u64, Result<GetRequestResponse, String>)>,
    reading: bool,
    last: Instant,
}

impl Reader {
    /// Reads a request's life, unless a read is under way or, if not `now`, the last one was just before.
    fn read(&mut self, number: u64, now: bool) {
        let Some(client) = self.client.clone().filter(|_| !self.reading) else { return };
        if !now && self.last.elapsed() < READ_INTERVAL {
            return;
        }
        (self.reading, self.last) = (true, Instant::now());
        let results = self.results.clone();
        tokio::spawn(async move {
            let life = feed::life(client, number).await;
            let _ = results.send((number, life)).await;
        });
    }
}

/// Shows the events of a feed on the terminal until the user quits. Errors before the first update are reported without a
/// change of the terminal.
///
/// # Errors
/// The feed failed, the terminal cannot be used, or a signal ended the display.
pub async fn run(mut events: mpsc::Receiver<FeedEvent>, interval: Duration) -> Result<(), CommandError> {
    let failed = |error: io::Error| CommandError::chain("the terminal", &error);
    let (results, mut lives) = mpsc::channel(1);
    let mut reader = Reader { client: None, results, reading: false, last: Instant::now() };
    let mut model = Model::new();
    loop {
        match events.recv().await.ok_or_else(super::feed_ended)? {
            FeedEvent::Watching(client) => reader.client = Some(client),
            FeedEvent::Lost(_) => {}
            FeedEvent::Failed(failure) => return Err(failure),
            FeedEvent::Update(update, first) => {
                model.update(*update, first);
                break;
            }
        }
    }
    let mut updated = Instant::now();
    let mut stops = Vec::new();
    for kind in [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()] {
        stops.push(signal(kind).map_err(failed)?);
    }
    let mut stopped =
        std::pin::pin!(futures::future::select_all(stops.iter_mut().map(|stop| Box::pin(stop.recv()))));
    let (mut screen, _restore) = Screen::open().map_err(failed)?;
    let mut input = EventStream::new();
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    screen.draw(&model).map_err(failed)?;
    loop {
        tokio::select! {
            _ = &mut stopped => return Err(CommandError::Silent(Exit::Interrupted)),
            event = events.recv() => match event.ok_or_else(super::feed_ended)? {
                FeedEvent::Watching(client) => reader.client = Some(client),
                FeedEvent::Failed(failure) => return Err(failure),
                FeedEvent::Lost(why) => {
                    reader.client = None;
                    model.lost(&why);
                    screen.draw(&model).map_err(failed)?;
                }
                // Drawn at the next tick.
                FeedEvent::Update(update, first) => {
                    model.update(*update, first);
                    updated = Instant::now();
                }
            },
            Some((number, life)) = lives.recv() => {
                reader.reading = false;
                model.life(number, life);
                screen.draw(&model).map_err(failed)?;
            }
            event = input.next() => {
                let event = event.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof));
                let action = match event.and_then(|event| event).map_err(failed)? {
                    Event::Key(key) => model.key(key),
                    Event::Paste(text) => {
                        model.paste(&text);
                        Action::Draw
                    }
                    Event::Resize(..) => {
                        // Everything is drawn again: the terminal may have cut the screen, also where its size is the same
                        // as before two resizes.
                        screen.terminal.draw(|_| {}).map_err(failed)?;
                        Action::Draw
                    }
                    _ => Action::Draw,
                };
                match action {
                    Action::Quit => return Ok(()),
                    Action::Read(number) => reader.read(number, true),
                    Action::Draw => {}
                }
                screen.draw(&model).map_err(failed)?;
            }
            _ = ticks.tick() => {
                model.wait(updated.elapsed());
                if let Some(follow) = &model.follow {
                    reader.read(follow.number, false);
                }
                screen.draw(&model).map_err(failed)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_harness::PseudoTerminal;

    /// Name of the test below, which the other one runs in a process of its own.
    const PANICS: &str = "top::terminal::tests::a_display_panics";

    #[test]
    #[ignore = "run by the_terminal_is_restored_before_a_panic_is_reported"]
    fn a_display_panics() {
        let (mut screen, _restore) = Screen::open().unwrap();
        screen.draw(&Model::new()).unwrap();
        panic!("a fault of the display");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_terminal_is_restored_before_a_panic_is_reported() -> anyhow::Result<()> {
        let program = std::env::current_exe()?;
        let arguments = [PANICS, "--exact", "--ignored", "--nocapture", "--test-threads=1"];
        let mut terminal = PseudoTerminal::start(&program, &arguments, &[], 24, 80)?;
        let status = terminal.wait().await?;
        anyhow::ensure!(!status.success(), "the test passed");
        terminal.wait_for("a fault of the display").await?;
        anyhow::ensure!(terminal.used_alternate_screen(), "nothing was drawn:\n{}", terminal.contents());
        terminal.check_restored()
    }
}
