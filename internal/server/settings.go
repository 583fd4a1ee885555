package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// settings are the options as they are now. Most are those of the start, and the server reads them from its configuration; those
// that can be changed while it runs have a row in changes.
type settings struct {
	level *slog.LevelVar // of the log; nil if it cannot be changed; constant while the server runs

	mu     sync.Mutex // held during a change, so that what is in force is what is shown
	config config.Config
}

func (t *settings) init(c config.Config) { t.config = c }

func (t *settings) current() config.Config {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.config
}

// change lets a new value of an option take effect. Only the first one in changes can fail, so that a reload changes all or nothing.
type change struct {
	name  string
	apply func(*Server, *config.Config) error
}

var changes = []change{
	{"cache-size", func(s *Server, c *config.Config) error {
		_, err := s.resizeStoreCache("value", int64(c.CacheSize))
		return err
	}},
	{"log-level", func(s *Server, c *config.Config) error {
		if s.settings.level != nil {
			s.settings.level.Set(c.LogLevel)
			s.observer.debug.Store(c.LogLevel <= slog.LevelDebug)
		}
		return nil
	}},
	{"slow-request-threshold", func(s *Server, c *config.Config) error {
		s.observer.reportFrom(c.SlowRequests.Threshold)
		return nil
	}},
	{"trace-ratio", func(s *Server, c *config.Config) error {
		if t := s.observer.traces; t != nil {
			t.SetRatio(c.Traces.Ratio)
		}
		return nil
	}},
}

func changeOf(name string) int {
	return slices.IndexFunc(changes, func(c change) bool { return c.name == name })
}

// restartNeededError is a change of an option that only a start reads.
type restartNeededError struct{ option string }

func (e *restartNeededError) Error() string {
	names := make([]string, 0, len(changes))
	for _, c := range changes {
		names = append(names, c.name)
	}
	return fmt.Sprintf("%s is read at the start only: change it there, and start the server again. What can be changed while it runs is %s",
		e.option, strings.Join(names, ", "))
}

// configReloadError is a configuration that cannot be used; nothing was changed.
type configReloadError struct{ cause error }

func (e *configReloadError) Error() string { return e.cause.Error() }
func (e *configReloadError) Unwrap() error { return e.cause }

// SetConfig implements Admin.
func (s *adminService) SetConfig(ctx context.Context, req *pb.SetConfigRequest) (*pb.SetConfigResponse, error) {
	out := new(pb.SetConfigResponse)
	err := s.serveAdmin(ctx, telemetry.MethodSetConfig, func() (err error) {
		out.Change, err = s.setConfig(req.GetName(), req.GetValue())
		return err
	})
	return out, err
}

func (s *Server) setConfig(name, value string) (*pb.ConfigChange, error) {
	t := &s.settings
	t.mu.Lock()
	defer t.mu.Unlock()
	next, err := t.config.With(config.Option{Name: name, Value: value, Origin: config.OriginRequest})
	i := changeOf(name)
	switch {
	case config.IsUnknownOption(err):
		return nil, invalid("name", err.Error())
	case i < 0:
		return nil, &restartNeededError{name}
	case err != nil:
		return nil, invalid("value", err.Error())
	}
	if err := changes[i].apply(s, &next); err != nil {
		return nil, err
	}
	done := &pb.ConfigChange{Name: name, Previous: t.config.Value(name), Value: next.Value(name)}
	t.config = next
	s.log.Info("option changed", "name", name, "value", done.Value, "before", done.Previous)
	return done, nil
}

// ReloadConfig implements Admin.
func (s *adminService) ReloadConfig(ctx context.Context, _ *pb.ReloadConfigRequest) (*pb.ReloadConfigResponse, error) {
	var out *pb.ReloadConfigResponse
	err := s.serveAdmin(ctx, telemetry.MethodReloadConfig, func() (err error) {
		out, err = s.reloadConfig()
		return err
	})
	return out, err
}

// reloadConfig reads the sources again. Options that were set while the server runs get the values of the sources.
func (s *Server) reloadConfig() (*pb.ReloadConfigResponse, error) {
	t := &s.settings
	t.mu.Lock()
	defer t.mu.Unlock()
	read, err := s.config.Reread()
	if err != nil {
		return nil, &configReloadError{err}
	}
	out, next := new(pb.ReloadConfigResponse), t.config
	now, then := t.config.Options(), read.Options()
	var apply []int
	for i := range then {
		if now[i].Value == then[i].Value {
			continue
		}
		difference := &pb.ConfigChange{Name: then[i].Name, Previous: now[i].Value, Value: then[i].Value}
		k := changeOf(then[i].Name)
		if k < 0 || then[i].Name == "cache-size" && read.CacheSize == 0 { // only a start derives a size
			out.RestartNeeded = append(out.RestartNeeded, difference)
			continue
		}
		if next, err = next.With(then[i]); err != nil { // valid with the new values of the others, but not with those that stay
			return nil, &configReloadError{err}
		}
		apply, out.Changed = append(apply, k), append(out.Changed, difference)
	}
	slices.Sort(apply)
	for _, k := range apply {
		if err := changes[k].apply(s, &next); err != nil {
			return nil, &configReloadError{err}
		}
	}
	t.config = next
	for _, c := range out.Changed {
		s.log.Info("option changed", "name", c.Name, "value", c.Value, "before", c.Previous)
	}
	for _, c := range out.RestartNeeded {
		s.log.Warn("a new value of an option waits for the next start", "name", c.Name, "value", c.Value, "in_force", c.Previous)
	}
	if len(out.Changed)+len(out.RestartNeeded) == 0 {
		s.log.Info("the configuration is as before")
	}
	return out, nil
}

// resizeCache changes the size of the page cache, and what is shown of it; field names it in an error.
func (s *Server) resizeCache(field string, bytes int64) (before int64, err error) {
	t := &s.settings
	t.mu.Lock()
	defer t.mu.Unlock()
	if before, err = s.resizeStoreCache(field, bytes); err != nil {
		return 0, err
	}
	if next, err := t.config.With(config.Option{Name: "cache-size", Value: config.Size(bytes).String(), Origin: config.OriginRequest}); err == nil {
		t.config = next
	}
	return before, nil
}

func (s *Server) resizeStoreCache(field string, bytes int64) (before int64, err error) {
	before, err = s.store.ResizeCache(bytes)
	if size, ok := errors.AsType[*storage.CacheSizeError](err); ok {
		return 0, invalid(field, fmt.Sprintf("is %d; choose from %d to %d", size.Bytes, size.Min, size.Max))
	}
	if err == nil {
		s.log.Info("page cache resized", "bytes", bytes, "before", before)
	}
	return before, err
}

// classifySettings classifies the errors of this file.
func classifySettings(err error) (fault, bool) {
	var (
		restart *restartNeededError
		reload  *configReloadError
	)
	switch {
	case errors.As(err, &restart):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_RESTART_NEEDED, metadata: map[string]string{"option": restart.option}}, true
	case errors.As(err, &reload):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_CONFIG_RELOAD_FAILED}, true
	}
	return fault{}, false
}
