package config

import (
	"errors"
	"maps"
)

// Where the value of an option comes from. That of a file is followed by its name and the line.
const (
	OriginDefault     = "default"
	OriginFlag        = "flag"
	OriginEnvironment = "environment"
	OriginFile        = "file"
	OriginRequest     = "set while running"
)

// origins are those of options that were given, by name: of several sources the last one that Load read.
type origins map[string]string

// Option is an option with its value, as text, and where the value comes from.
type Option struct{ Name, Value, Origin string }

// Options are all options, in the order of --help.
func (c Config) Options() []Option {
	o := newOptions()
	o.config = c
	var all []Option
	for _, name := range o.names() {
		option := Option{Name: name, Value: o.flags.Lookup(name).Value.String(), Origin: OriginDefault}
		if c.origins != nil && (*c.origins)[name] != "" {
			option.Origin = (*c.origins)[name]
		}
		all = append(all, option)
	}
	return all
}

// sources are what Load has read, for Reread.
type sources struct{ args, environ []string }

// Value is the value of an option, as text; empty if there is none of that name.
func (c Config) Value(name string) string {
	o := newOptions()
	o.config = c
	if f := o.flags.Lookup(name); f != nil {
		return f.Value.String()
	}
	return ""
}

// With is the configuration with another value of an option. The error of a name that is not an option says which there are;
// others say what is wrong with the value, or does not fit the other options.
func (c Config) With(option Option) (Config, error) {
	o := newOptions()
	o.config = c
	if err := o.set(option.Name, option.Value); err != nil {
		return c, err
	}
	changed := origins{}
	if c.origins != nil {
		maps.Copy(changed, *c.origins)
	}
	changed[option.Name] = option.Origin
	o.config.origins = &changed
	return o.config, o.config.Validate()
}

// Reread reads the sources again. Flags and environment are those of the start: the configuration file may have changed.
func (c Config) Reread() (Config, error) {
	if c.sources == nil { // not made by Load
		return c, nil
	}
	in, err := load(c.sources.args, c.sources.environ, true)
	return in.Config, err
}

// IsUnknownOption reports whether an error of With is that of a name.
func IsUnknownOption(err error) bool { return errors.Is(err, errUnknownOption) }
