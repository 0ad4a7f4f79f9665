"""The work of the subcommands of ``ds-vrgd``; ``ds_vrgd_cli`` has their options."""
