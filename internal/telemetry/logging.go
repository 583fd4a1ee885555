package telemetry

import (
	"io"
	"log/slog"

	"github.com/epochkv/epochkv/internal/config"
)

// NewLogger writes lines of the configured level and format to w.
func NewLogger(w io.Writer, level slog.Leveler, format config.LogFormat) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if format == config.LogJSON {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
