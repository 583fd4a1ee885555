package main

import (
	"strings"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

// checkDashboard decodes the dashboard strictly with Grafana's schema, its panels and queries included.
func checkDashboard(path string) error {
	data, err := read(path)
	if err != nil {
		return err
	}
	plugins.RegisterDefaultPlugins()
	var d dashboard.Dashboard
	if err := found(d.UnmarshalJSONStrict(data)); err != nil {
		return err
	}
	if len(d.Panels) == 0 {
		return errNothing
	}
	return found(d.Validate())
}

// found is an error with a text: the package returns a list of errors that is empty, and not nil, if there are none.
func found(err error) error {
	if err == nil || strings.TrimSpace(err.Error()) == "" {
		return nil
	}
	return err
}
