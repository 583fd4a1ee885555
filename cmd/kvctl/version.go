package main

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// buildVersion is what the Go toolchain knows of this build: a tag, a commit, or nothing.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "(devel)"
	}
	return info.Main.Version
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version of kvctl",
		Long:  `Show the version of kvctl itself. The server's is part of kvctl status.`,
		Example: `  kvctl version
  kvctl status -o json | jq -r .build.version`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			platform := runtime.GOOS + "/" + runtime.GOARCH
			switch format := a.formatOr(formatTable); format {
			case formatTable, formatRaw:
				return a.print("kvctl %s %s %s\n", buildVersion(), runtime.Version(), platform)
			default:
				return a.printJSON(format, map[string]string{
					"version": buildVersion(), "go_version": runtime.Version(), "platform": platform,
				})
			}
		},
	}
}
