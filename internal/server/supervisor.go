package server

import (
	"log/slog"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifySupervisor tells systemd the server's state if systemd started it with Type=notify.
// Otherwise it does nothing.
func notifySupervisor(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("cannot notify systemd", "state", state, "error", err)
	}
}
